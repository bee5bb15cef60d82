"""Why a test of Keras cannot pass on several ranks."""

# Patterns of variants and of tests ("Class::test"), and the reason.
CANNOT: tuple[tuple[str, str, str], ...] = (
    (
        "*",
        "BackupAndRestoreCallbackTest::test_best_case_step",
        "shardcore goes on within the epoch, whose finished steps Keras runs again",
    ),
)
# Files below keras/src that do not run, and why.
LEFT_OUT = {
    "applications/": "downloads weights",
    "backend/jax/": "of another backend",
    "backend/openvino/": "of another backend",
    "backend/tensorflow/": "of another backend",
    "distribution/": "runs in tests/distributed/keras_distribution",
}
