"""The failure watch, which ends all ranks when one fails or does not come. It imports `job`."""
