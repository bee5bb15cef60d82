"""Parts of a Keras model that are replaced or changed between two steps."""

import keras
import torch
from torch.nn.modules import module as of_all_modules


class Scaling(keras.layers.Layer):
    rate = 1.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0))

    def call(self, inputs):
        return self.inner(inputs) * self.rate

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape)


def doubled(self, inputs):
    return self.inner(inputs) * self.rate * 2.0


class Doubling(Scaling):
    def call(self, inputs):
        return super().call(inputs) * 2.0


class Penalized(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) * 1.0


class Tripled(Penalized):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 3.0


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def other_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(3, name="dense", kernel_regularizer=keras.regularizers.L2(0.01))(
        inputs
    )
    scaled = keras.layers.Lambda(lambda x, rates: x * rates[0], arguments={"rates": [1.0]})(hidden)
    hidden = Scaling(name="scaling")(scaled)
    hidden = keras.layers.Dropout(0.1, seed=3, name="dropout")(hidden)
    hidden = keras.layers.LayerNormalization(name="norm")(hidden)
    model = Penalized(inputs, keras.layers.Dense(1, name="head")(hidden))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.5), own_loss)
    return model


def twice(inputs, *args, **kwargs):
    return inputs * 2.0


def halve(parameter):
    parameter.grad.mul_(0.5)


def layer(model, name="scaling"):
    return model.get_layer(name)


def inner(model):
    return layer(model).inner.module  # Keras wraps it


def lambda_of(model):
    return next(part for part in model.layers if isinstance(part, keras.layers.Lambda))


def kernel(model):
    return layer(model, "dense").kernel


def triple_loss(model):
    kept = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: 3.0 * kept(*args, **kwargs)


def no_update(model):
    model.optimizer.apply = lambda gradients, variables=None: None


def set_code(function, other):
    function.__code__ = other.__code__


# What a user does between two steps, with the model; then what puts back what is not the model's.
CHANGES = {
    "call of a layer of Keras": lambda m: setattr(layer(m, "norm"), "call", twice),
    "call of an own layer": lambda m: setattr(layer(m), "call", twice),
    "call of a class": lambda m: setattr(Scaling, "call", lambda self, inputs: inputs * 2.0),
    "code of a call": lambda m: set_code(Scaling.call, doubled),
    "class of a layer": lambda m: setattr(layer(m), "__class__", Doubling),
    "class of a model": lambda m: setattr(m, "__class__", Tripled),
    "compute_loss": triple_loss,
    "the loss function": lambda m: set_code(own_loss, other_loss),
    "apply of the optimizer": no_update,
    "clipnorm": lambda m: setattr(m.optimizer, "clipnorm", 1e-3),
    "global_clipnorm": lambda m: setattr(m.optimizer, "global_clipnorm", 1e-3),
    "weight_decay": lambda m: setattr(m.optimizer, "weight_decay", 0.5),
    "momentum": lambda m: setattr(m.optimizer, "momentum", 0.0),
    "nesterov": lambda m: setattr(m.optimizer, "nesterov", True),
    "rate of a schedule": lambda m: setattr(
        m.optimizer._learning_rate, "initial_learning_rate", 5.0
    ),
    "another schedule": lambda m: setattr(
        m.optimizer, "_learning_rate", keras.optimizers.schedules.CosineDecay(5.0, 10)
    ),
    "a regularizer's factor": lambda m: setattr(layer(m, "dense").kernel.regularizer, "l2", 1.0),
    "a regularizer": lambda m: setattr(kernel(m), "regularizer", keras.regularizers.L2(1.0)),
    "a regularizer of the head": lambda m: setattr(
        layer(m, "head").kernel, "regularizer", keras.regularizers.L1(1.0)
    ),
    "a constraint": lambda m: setattr(kernel(m), "constraint", keras.constraints.MaxNorm(0.1)),
    "an own regularizer": lambda m: setattr(
        kernel(m), "regularizer", lambda weights: 9.0 * keras.ops.sum(weights)
    ),
    "an activity regularizer": lambda m: setattr(
        layer(m, "head"), "activity_regularizer", keras.regularizers.L2(1.0)
    ),
    "an activation": lambda m: setattr(layer(m, "head"), "activation", keras.activations.tanh),
    "an own activation": lambda m: setattr(layer(m, "head"), "activation", lambda x: x * 3.0),
    "epsilon": lambda m: setattr(layer(m, "norm"), "epsilon", 0.5),
    "trainable of a layer": lambda m: setattr(layer(m, "head"), "trainable", False),
    "trainable of a variable": lambda m: setattr(kernel(m), "trainable", False),
    "rate of a dropout": lambda m: setattr(layer(m, "dropout"), "rate", 0.9),
    "arguments of a Lambda": lambda m: lambda_of(m).arguments["rates"].__setitem__(0, 2.0),
    "function of a Lambda": lambda m: setattr(lambda_of(m), "function", lambda x, rates: x * 5.0),
    "weights": lambda m: m.set_weights([weight * 2.0 for weight in m.get_weights()]),
    "a class attribute": lambda m: setattr(Scaling, "rate", 2.0),
    "an attribute that hides one": lambda m: setattr(layer(m), "rate", 2.0),
    "another inner module": lambda m: setattr(layer(m).inner, "module", torch.nn.Tanh()),
    "a module in a Sequential": lambda m: inner(m).__setitem__(0, torch.nn.Tanh()),
    "a module that is appended": lambda m: inner(m).append(torch.nn.Tanh()),
    "rate of a torch dropout": lambda m: setattr(inner(m)[1], "p", 1.0),
    "forward of a torch module": lambda m: setattr(inner(m)[0], "forward", twice),
    "a parameter's data": lambda m: inner(m)[0].weight.data.mul_(3.0),
    "requires_grad of a parameter": lambda m: inner(m).requires_grad_(False),
    "a hook of a torch module": lambda m: inner(m)[0].register_forward_hook(
        lambda module, inputs, outputs: outputs * 2.0
    ),
    "a hook before a torch module": lambda m: inner(m)[0].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 2.0,)
    ),
    "a backward hook": lambda m: inner(m)[0].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(None if x is None else x * 5.0 for x in inputs)
    ),
    "a hook of a layer": lambda m: layer(m, "dense").register_forward_hook(
        lambda module, inputs, outputs: outputs * 2.0
    ),
    "a hook of a tensor": lambda m: kernel(m).value.register_hook(lambda grad: grad * 5.0),
    "a hook of a parameter": lambda m: kernel(m).value.register_post_accumulate_grad_hook(halve),
    "a hook of all modules": lambda m: HOOKS.append(
        of_all_modules.register_module_forward_hook(
            lambda module, inputs, outputs: (
                outputs * 2.0 if isinstance(module, torch.nn.Linear) else None
            )
        )
    ),
    "a hook before all modules": lambda m: HOOKS.append(
        of_all_modules.register_module_forward_pre_hook(
            lambda module, inputs: (
                (inputs[0] * 2.0,) if isinstance(module, torch.nn.Linear) else None
            )
        )
    ),
    "a parametrization": lambda m: torch.nn.utils.parametrizations.weight_norm(inner(m)[0]),
}
HOOKS = []
