"""Plain torch modules, wrapped in a Keras layer, against one device."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.layers.torch_zoo import MEGATRON, RANDOM, ROWS, mlp, wrapped, zoo
from tests.distributed.programs import STRATEGY, assert_close, distribute, local, placements

PICTURES = RANDOM.normal(size=(6, 4, 5, 5)).astype("float32")
TOKENS = RANDOM.integers(0, 10, size=(6, 3))
TARGETS = RANDOM.normal(size=(6, 4)).astype("float32")


def trained(mesh, rules):
    if mesh:
        distribute(mesh, rules)
    model = zoo()
    model.compile(keras.optimizers.Adam(0.05, epsilon=1e-2), "mse", jit_compile=False)
    batch = [PICTURES, TOKENS]
    losses = [float(model.train_on_batch(batch, TARGETS)) for _ in range(3)]
    predictions = model.predict(batch, batch_size=4, verbose=0)
    return model, {"losses": np.array(losses), "predictions": predictions, **state(model)}


def state(model):
    """Everything that the torch modules of `model` hold, whole, and its Keras weights."""
    found = {f"weight {n}": v.numpy() for n, v in enumerate(model.get_layer("seen").variables)}
    for name in ("pictures", "text"):
        tensors = model.get_layer(name).module.state_dict()
        found |= {f"{name} {key}": keras.ops.convert_to_numpy(t) for key, t in tensors.items()}
    seen = model.get_layer("text").module.seen
    return found | {"seen": keras.ops.convert_to_numpy(seen)}


# Output channels of a torch kernel come first; the second rule is written PyTorch's way.
SHARDED = {
    "pictures/body/[14]/weight": ("model", None, None, None),
    r"pictures\.body\.2\..*": ("model",),
    "text/table/weight": ("model", None),
    "text/attention/in_proj_weight": ("model", None),
    "text.attention.out_proj.weight": (None, "model"),
    r"text/lstm/weight_.*": ("model", None),
    "text/down/weight": (None, "model"),
    ".*torch_module_wrapper.*weight": (None, "model"),
}


@pytest.fixture(scope="module")
def one_device():
    return run_ranks(lambda rank: trained(None, {})[1], 1)[0]


@pytest.mark.parametrize(("mesh", "rules"), [((2, 1), {}), ((1, 2), SHARDED)])
def test_wrapped_modules_train_as_on_one_device(mesh, rules, one_device):
    def program(rank):
        model, results = trained(mesh, rules)
        report = shardcore.rules_report(model)
        assert report.unused_rules == ()
        before = state(model)
        assert shardcore.verify(model, ([PICTURES, TOKENS], TARGETS)).ok
        for name, value in state(model).items():
            if name != "seen":  # state that torch does not list
                np.testing.assert_array_equal(value, before[name], err_msg=name)
        wrappers = [model.get_layer(name) for name in ("pictures", "text")]
        wrappers.append(model.get_layer("head").dense)
        for wrapper in wrappers:
            parameters = list(wrapper.module.parameters())
            held = [variable._value for variable in wrapper.variables]
            assert [id(each) for each in held] == [id(each) for each in parameters]
        module = model.get_layer("text").module
        assert module.logits.weight is module.table.weight
        return results, {v.path: local(v).shape for v in model.variables if "/" in v.path}

    results = run_ranks(program, 2, timeout=120)
    assert_close([values for values, _ in results], one_device, atol=5e-5)
    shapes = results[0][1]
    sharded = mesh == (1, 2)
    assert shapes["text/table/weight"] == ((5, 4) if sharded else (10, 4))
    assert shapes["text/lstm/weight_hh_l0"] == ((12, 6) if sharded else (24, 6))
    assert shapes["pictures/body/1/weight"] == ((4, 4, 3, 3) if sharded else (8, 4, 3, 3))


def test_a_file_has_the_whole_module_for_plain_keras_and_another_mesh(tmp_path):
    file, weights = str(tmp_path / "m.keras"), str(tmp_path / "m.weights.h5")

    def save(rank):
        distribution = distribute((1, 2), {})
        module = shardcore.parallelize_torch_module(mlp(), distribution.device_mesh, MEGATRON)
        model = wrapped(module)
        model.train_on_batch(ROWS, ROWS)
        model.save(file)
        model.save_weights(weights)
        assert placements(module[0].weight) == "R S(0)"  # as before
        with count_collectives() as traffic:
            predictions = model.predict(ROWS, verbose=0)
        assert traffic.calls["all_reduce"] == 1  # the edges are back at work
        return predictions, model.train_on_batch(ROWS, ROWS)

    def load(rank):
        found = loaded()  # plain Keras
        distribute((2, 1), {"mlp/0/weight": ("model", None)})
        return found + loaded()

    def loaded():
        model = keras.models.load_model(file, safe_mode=False)
        fresh = wrapped(mlp())
        fresh.load_weights(weights)
        return [(m.predict(ROWS, verbose=0), m.train_on_batch(ROWS, ROWS)) for m in (model, fresh)]

    predictions, loss = run_ranks(save, 2)[0]
    for found in run_ranks(load, 2):
        for number, (predicted, next_loss) in enumerate(found):
            np.testing.assert_allclose(predicted, predictions, atol=1e-5, err_msg=str(number))
            np.testing.assert_allclose(next_loss, loss, atol=1e-5, err_msg=str(number))


def test_a_wrapped_module_of_before_the_distribution_can_be_moved():
    def program(rank):
        one_device = fitted(built())
        shardcore.install(STRATEGY)
        model = built()
        distribute((1, 2), {})
        for variable in model.variables:
            shardcore.distribute_variable(variable, ("model", *[None] * (variable.ndim - 1)))
        return fitted(model), one_device

    def built():
        keras.utils.set_random_seed(1)
        return wrapped(mlp())

    def fitted(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = [model.train_on_batch(ROWS, ROWS) for _ in range(3)]
        tensors = model.layers[0].module.state_dict()
        whole = {name: keras.ops.convert_to_numpy(tensor) for name, tensor in tensors.items()}
        return whole | {"losses": np.array(losses)}

    for results, one_device in run_ranks(program, 2):
        assert_close([results], one_device)


def test_one_device_keeps_the_module_as_it_is():
    def program(rank):
        distribution = distribute((1, 1), {})
        module = mlp()
        parameters = list(module.parameters())
        shardcore.parallelize_torch_module(module, distribution.device_mesh, MEGATRON)
        assert list(map(id, module.parameters())) == list(map(id, parameters))
        keras.utils.set_random_seed(1)
        layer = wrapped(mlp()).layers[0]
        assert [placements(p) for p in layer.module.parameters()] == ["plain"] * 6
        model = keras.Sequential([layer])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        for parameter in layer.module.parameters():
            before = parameter.detach().clone()
            model.train_on_batch(ROWS, ROWS)
            assert bool((parameter != before).any())

    run_ranks(program, 1)
