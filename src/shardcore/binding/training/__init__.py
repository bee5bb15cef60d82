"""Train, test and predict steps, and loops outside `fit`.

`install` imports `steps.Steps` and the functions of `loops`.
"""
