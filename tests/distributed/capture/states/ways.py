"""Ways from a layer, a model or a loss to the state that it reads.

The texts are parts of programs, as those of `kinds`; `{0}` is the expression that reads a number.
"""

DECORATOR = """
def through(function):
    @functools.wraps(function)
    def wrapper(self):
        return function(self)
    return wrapper
"""
# How an attribute of an owner is read.
ACCESSES = {
    "by a dot": "{0}.state",
    "by a computed name": "getattr({0}, ''.join(['sta', 'te']))",
    "by getattr": "getattr({0}, 'state', None)",
    "by vars": "vars({0})['state']",
    "by __dict__": "{0}.__dict__.get('state')",
    "by attrgetter": "operator.attrgetter('state')({0})",
    "by object": "object.__getattribute__({0}, 'state')",
}
# How the layer, the model or the loss reaches it: an expression of it and what that needs.
REACHES = {
    "directly": ("{0}", "", ""),
    "in a method": ("self.reach()", "", "def reach(self):\n    return {0}"),
    "in a property": ("self.reach", "", "@property\ndef reach(self):\n    return {0}"),
    "in a static method": (
        "self.reach(self)",
        "",
        "@staticmethod\ndef reach(self):\n    return {0}",
    ),
    "in a helper": ("reach(self)", "def reach(self):\n    return {0}", ""),
    "in a helper of a helper": (
        "more(self)",
        "def reach(self):\n    return {0}\ndef more(self):\n    return reach(self)",
        "",
    ),
    "in a comprehension": ("[{0} for _ in range(1)][0]", "", ""),
    "in a generator": ("sum({0} for _ in range(1))", "", ""),
    "in a lambda": ("list(map(lambda _: {0}, [0]))[0]", "", ""),
    "in a partial": ("functools.partial(reach, self)()", "def reach(self):\n    return {0}", ""),
    "by super": ("super().reach()", "class Reach:\n    def reach(self):\n        return {0}", ""),
    "by a decorator": (
        "self.reach()",
        DECORATOR,
        "@through\ndef reach(self):\n    return {0}",
    ),
    "in a context": (
        "self.reach()",
        "@contextlib.contextmanager\ndef entered(self):\n    yield {0}",
        "def reach(self):\n    with entered(self) as number:\n        return number",
    ),
    "by a table of functions": ("REACHES['a'](self)", "REACHES = {{'a': lambda self: {0}}}", ""),
    "in a helper that is exec'd": (
        "REACHED['reach'](self)",
        "REACHED = dict(globals())\nexec('''def reach(self):\n    return {0}''', REACHED)",
        "",
    ),
    "in a function of a function": ("reach()", "", ""),
}
# What reads: its bases, the methods that read, and what is changed afterwards.
ROLES = {
    "layer": (
        "keras.layers.Layer",
        "def call(self, inputs):\n    {1}\n    return self.head(inputs * {0})",
        "self.head = keras.layers.Dense(1)",
        "held = Held()\n    model = keras.Sequential([keras.Input((3,)), held])",
        "'mse'",
        "0.05",
    ),
    "model": (
        "keras.Model",
        "def call(self, inputs):\n    {1}\n    return self.head(inputs * {0})",
        "self.head = keras.layers.Dense(1)",
        "held = model = Held()",
        "'mse'",
        "0.05",
    ),
    "loss": (
        "keras.losses.Loss",
        "def call(self, y_true, y_pred):\n    {1}\n"
        "    return ops.mean(ops.square(y_true - y_pred), axis=-1) * {0}",
        "pass",
        "held = Held()\n    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])",
        "held",
        "0.05",
    ),
    "regularizer": (
        "keras.regularizers.Regularizer",
        "def __call__(self, weights):\n    {1}\n    return ops.sum(ops.square(weights)) * {0}",
        "pass",
        "held = Held()\n    dense = keras.layers.Dense(1, kernel_regularizer=held)\n"
        "    model = keras.Sequential([keras.Input((3,)), dense])",
        "'mse'",
        "0.05",
    ),
    "schedule": (
        "keras.optimizers.schedules.LearningRateSchedule",
        "def __call__(self, step):\n    {1}\n    return ops.convert_to_tensor(0.02) * {0}",
        "pass",
        "held = Held()\n    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])",
        "'mse'",
        "held",
    ),
}
