"""State in objects of Keras, torch and Python that a layer holds: what reads it, and changes it."""

import dataclasses
import functools
import sys
import threading
import types
import typing
import weakref

import attrs
import keras
import torch


def values_of_a_cache_that_is_filled_again():
    config = [1.0]

    @functools.lru_cache
    def rate():
        return config[0]

    def change():
        config[0] = 2.0
        rate.cache_clear()
        rate()

    rate()
    return rate, change


def a_cache_of_one_value():
    config = [1.0]

    @functools.lru_cache(maxsize=1)
    def rate(scale):
        return scale * config[0]

    def change():
        config[0] = 2.0
        rate(5.0)
        rate(1.0)

    rate(1.0)
    return lambda: rate(1.0), change


def a_gradient_of_a_tensor():
    held = torch.ones(1, requires_grad=True)
    return (
        lambda: 1.0 if held.grad is None else held.grad.detach(),
        lambda: setattr(held, "grad", torch.full((1,), 2.0)),
    )


def a_gradient_of_a_parameter():
    held = torch.nn.Parameter(torch.ones(1))
    return (
        lambda: 1.0 if held.grad is None else held.grad.detach(),
        lambda: setattr(held, "grad", torch.full((1,), 2.0)),
    )


class OwnTensor(torch.Tensor):
    """A tensor with a method."""

    def rate(self):
        return 1.0


class OwnParameter(torch.nn.Parameter):
    """A parameter with attributes."""


def an_attribute_of_an_own_tensor():
    held = torch.ones(1).as_subclass(OwnTensor)
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 2.0)


def an_attribute_of_an_own_parameter():
    held = OwnParameter(torch.ones(1))
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 2.0)


def a_method_of_an_own_tensor():
    held, before = torch.ones(1).as_subclass(OwnTensor), OwnTensor.rate
    return (
        lambda: 1.0 * held.rate(),
        lambda: setattr(OwnTensor, "rate", lambda self: 2.0),
        lambda: setattr(OwnTensor, "rate", before),
    )


def an_attribute_of_a_list_of_parameters():
    held = torch.nn.ParameterList()
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 2.0)


def an_attribute_of_a_dict_of_parameters():
    held = torch.nn.ParameterDict()
    held.scale = 1.0
    return lambda: held.scale, lambda: setattr(held, "scale", 2.0)


def metadata_of_a_dataclass():
    rates = [1.0]

    @dataclasses.dataclass
    class Own:
        rate: float = dataclasses.field(default=0.0, metadata={"rates": rates})

    return (
        lambda: dataclasses.fields(Own)[0].metadata["rates"][0],
        lambda: rates.__setitem__(0, 2.0),
    )


def a_default_of_a_dataclass():
    @dataclasses.dataclass
    class Own:
        rate: float = 1.0

    return (
        lambda: dataclasses.fields(Own)[0].default,
        lambda: setattr(Own.__dataclass_fields__["rate"], "default", 2.0),
    )


def metadata_of_attrs():
    rates = [1.0]

    @attrs.define
    class Own:
        rate: float = attrs.field(default=0.0, metadata={"rates": rates})

    return lambda: attrs.fields(Own)[0].metadata["rates"][0], lambda: rates.__setitem__(0, 2.0)


class Rated:
    """A class with a rate."""

    rate = 1.0


def set_rate(rate):
    Rated.rate = rate


RATES = lambda: set_rate(2.0), lambda: set_rate(1.0)


def a_class_in_an_alias():
    alias = list[Rated]
    return lambda: typing.get_args(alias)[0].rate, *RATES


def a_class_that_is_an_alias():
    alias = types.GenericAlias(Rated, (int,))
    return lambda: alias.rate, *RATES


def a_class_in_a_union():
    union = Rated | int
    return lambda: union.__args__[0].rate, *RATES


def a_loss_of_all_models():
    model, before = keras.Sequential(), keras.Model.compute_loss
    keras.Model.compute_loss = lambda self: 1.0
    return (
        lambda: 1.0 * model.compute_loss(),
        lambda: setattr(keras.Model, "compute_loss", lambda self: 2.0),
        lambda: setattr(keras.Model, "compute_loss", before),
    )


def a_class_of_a_module():
    module = types.ModuleType("of_a_test")
    module.rate = 1.0

    class Own(types.ModuleType):
        rate = property(lambda self: 2.0)

    sys.modules["of_a_test"] = module
    return lambda: module.rate, lambda: setattr(module, "__class__", Own)


def a_class_of_a_class():
    class Kind(type):
        def rate(cls):
            return 1.0

    class Other(type):
        def rate(cls):
            return 2.0

    own = Kind("Own", (), {})
    return lambda: own.rate(), lambda: setattr(own, "__class__", Other)  # noqa: PLW0108 - late


def an_attribute_of_a_thread():
    thread = threading.current_thread()
    thread.rate = 1.0
    return lambda: threading.current_thread().rate, lambda: setattr(thread, "rate", 2.0)


def what_a_proxy_refers_to():
    held = Rated()
    proxy = weakref.proxy(held)
    return lambda: proxy.rate * (held is not None), lambda: setattr(held, "rate", 2.0)


HELD = (
    *(values_of_a_cache_that_is_filled_again, a_cache_of_one_value, a_gradient_of_a_tensor),
    *(a_gradient_of_a_parameter, an_attribute_of_an_own_tensor, a_method_of_an_own_tensor),
    *(an_attribute_of_an_own_parameter, an_attribute_of_a_list_of_parameters),
    *(an_attribute_of_a_dict_of_parameters, metadata_of_a_dataclass, a_default_of_a_dataclass),
    *(metadata_of_attrs, a_class_in_an_alias, a_class_that_is_an_alias, a_class_in_a_union),
    *(a_loss_of_all_models, a_class_of_a_module, a_class_of_a_class, an_attribute_of_a_thread),
    what_a_proxy_refers_to,
)
