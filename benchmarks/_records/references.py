"""What the errors of a record are relative to, in the words that stand above them."""

# By benchmark, of a measurement's `errors`. Each says what the code that measures compares with.
ERRORS_OF = {
    "syrk": "‖result - exact‖/‖exact‖ (Frobenius norm). Exact is the same product of the same"
    " inputs in float64.",
    "newton_schulz": "‖result - exact‖/‖exact‖ (Frobenius norm). Exact is the same iteration of the"
    " same input in float64: five standard steps, or for packages with other coefficients theirs."
    " Polar errors say how far a result is from the polar factor.",
    "muon": "‖update - reference‖/‖reference‖ (Frobenius norm), the largest over the parameters."
    " The reference of `muon` with defaults, and of optax with products in 16 bits, is optax's"
    " update, which iterates in the dtype of the gradients; that of `balanced` is the same update"
    " with products in float32.",
    "sharded": "‖change - reference‖/‖reference‖ (Frobenius norm) of what two steps change (before"
    " 2026-11-29: of one update), the largest over the parameters. The reference is the same"
    " optimizer, in the same precision, on one device. So an error of 0 means that sharding changed"
    " no bit; it says nothing about rounding.",
    "start": "The error is ‖update - exact‖/‖exact‖ (Frobenius norm) of the smallest matrix in the"
    " first update. Exact is the same update in float64, with each optimizer's own coefficients.",
}
POLAR_ERRORS = (
    "‖UₖᵀO - Vₖᵀ‖/√k (Frobenius norm) of a result O, relative to the polar factor UVᵀ of its input"
    " X = UΣVᵀ in float64, over the k singular values of X above {}. A stack counts by its first"
    " matrix."
)
