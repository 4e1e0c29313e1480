"""Colors of plots."""

# Colors that are told apart without red and green, too (Okabe and Ito), without their yellow.
PALETTE = ("black", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")
