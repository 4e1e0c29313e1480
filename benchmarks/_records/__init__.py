"""Files of measurements: how they are written, read, printed and plotted."""
