"""Plain torch modules, wrapped in a Keras layer or laid out by rules, against one device."""

import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from torch import nn

import shardcore
from shardcore.binding.training.loops import COMPARED
from shardcore.domain.errors import LayoutError, MeshError, RuleError, StrategyError
from shardcore.domain.mesh import Mesh
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import STRATEGY, assert_close, distribute, local, placements

RANDOM = np.random.default_rng(0)
PICTURES = RANDOM.normal(size=(6, 4, 5, 5)).astype("float32")
TOKENS = RANDOM.integers(0, 10, size=(6, 3))
TARGETS = RANDOM.normal(size=(6, 4)).astype("float32")
ROWS = RANDOM.normal(size=(6, 4)).astype("float32")


class Pictures(nn.Module):
    """Convolutions, batch statistics of three kinds, one of them without a parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.InstanceNorm2d(4, track_running_stats=True),
            nn.Conv2d(4, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 2),
            nn.GroupNorm(2, 6),
        )

    def forward(self, x):
        return self.body(x).flatten(1)


class Text(nn.Module):
    """Attention and recurrence; a tied table; state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.down = nn.Linear(6, 4)
        self.logits = nn.Linear(4, 10, bias=False)
        self.logits.weight = self.table.weight
        self.regularized = [self.down.weight]
        self.scale = torch.arange(1.0, 5.0)
        self.seen = torch.zeros(4)

    def forward(self, tokens):
        x = self.table(tokens)
        with torch.no_grad():
            self.seen += x.sum((0, 1))
        x = self.norm(x + self.attention(x, x, x)[0]) * self.scale
        hidden = self.down(self.lstm(x)[0])
        return self.logits(hidden).mean(1) + 0.1 * self.regularized[0].sum()


class Head(keras.layers.Layer):
    """Keras wraps a torch module that is assigned to an attribute."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = nn.Linear(16, 4)

    def call(self, x):
        return self.dense(x)


def zoo():
    keras.utils.set_random_seed(1)
    pictures = keras.Input((4, 5, 5))
    tokens = keras.Input((3,), dtype="int64")
    wrap = keras.layers.TorchModuleWrapper
    seen = wrap(Pictures(), name="pictures", output_shape=(None, 24))(pictures)
    read = wrap(Text(), name="text", output_shape=(None, 10))(tokens)
    joined = keras.layers.Concatenate()([keras.layers.Dense(6, name="seen")(seen), read])
    head = Head(name="head")
    head.compute_output_shape = lambda _: (None, 4)
    return keras.Model([pictures, tokens], head(joined))


def trained(mesh, rules):
    if mesh:
        distribute(mesh, rules)
    model = zoo()
    model.compile(keras.optimizers.Adam(0.05, epsilon=1e-2), "mse")
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


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


MEGATRON = {"0.weight": ("model", None), "0.bias": ("model",), "3.weight": (None, "model")}


def wrapped(module):
    layer = keras.layers.TorchModuleWrapper(module, name="mlp", output_shape=(None, 4))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


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


def hand_loop(module, x):
    """Four steps of torch's own: the losses, the state, and what the last moves, without checks."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05, eps=1e-2)
    losses = []
    for _ in range(COMPARED + 1):
        optimizer.zero_grad()
        with count_collectives() as traffic:
            loss = (module(x) ** 2).mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    whole = {n: keras.ops.convert_to_numpy(t) for n, t in module.state_dict().items()}
    return whole | {"losses": np.array(losses)}, dict(traffic.calls)


def pair():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.parametrize(("inputs_are_trained", "reductions"), [(False, 1), (True, 2)])
def test_a_megatron_pair_is_one_device_with_one_reduction_each_way(inputs_are_trained, reductions):
    rules = [("0.weight", ("model", None)), ("0.bias", ("model",)), ("2.weight", (None, "model"))]

    def program(rank):
        one_device, _ = trained_by_hand(0)
        mesh = distribute((1, 2), {}).device_mesh
        return one_device, *trained_by_hand(
            rank, mesh
        )  # ranks that drew other values take rank 0's

    def trained_by_hand(seed, mesh=None):
        torch.manual_seed(seed)
        module = pair()
        x = torch.as_tensor(ROWS).clone().requires_grad_(inputs_are_trained)
        if mesh:
            shardcore.parallelize_torch_module(module, mesh, rules)
            placed = [placements(parameter) for parameter in module.parameters()]
            assert placed == ["R S(0)", "R S(0)", "R S(1)", "R R"]
        results, calls = hand_loop(module, x)
        return results | ({"gradient": x.grad.numpy()} if inputs_are_trained else {}), calls

    for one_device, results, calls in run_ranks(program, 2):
        assert_close([results], one_device)
        assert calls == {"all_reduce": reductions}


def test_rules_reach_outputs_and_a_batch_that_is_sharded():
    def program(rank):
        torch.manual_seed(1)
        one_device, _ = hand_loop(mlp(), torch.as_tensor(ROWS))
        rules = keras.distribution.LayoutMap(distribute((2, 2), {}).device_mesh)
        for key, spec in {**MEGATRON, "1.output": ("data", None)}.items():
            rules[key] = spec
        torch.manual_seed(1)
        mesh = Mesh((2, 2), ("data", "model"))
        module = shardcore.parallelize_torch_module(mlp(), mesh, rules)
        seen = []
        module[2].register_forward_pre_hook(lambda _, args: seen.append(placements(args[0])))
        x = shardcore.ensure_dtensor_input(ROWS)
        results, _ = hand_loop(module, x)
        module(x.requires_grad_() * 2).sum().backward()
        return one_device, results, seen, placements(x.grad)

    for one_device, results, seen, gradient in run_ranks(program, 4):
        assert_close([results], one_device)
        assert seen == ["S(0) R"] * (COMPARED + 2)
        assert gradient == "S(0) R"  # no sum is left pending before the module either


def test_a_module_that_cannot_be_parallelized_is_refused_by_name():
    def program(rank):
        parallelize = shardcore.parallelize_torch_module
        shardcore.install(STRATEGY)
        with pytest.raises(StrategyError, match="No distribution is set"):
            parallelize(mlp(), Mesh((1, 2), ("data", "model")), {})
        mesh = distribute((1, 2), {}).device_mesh
        with pytest.raises(StrategyError, match=r"takes a torch\.nn\.Module, got function"):
            parallelize(mlp, mesh, {})
        with pytest.raises(MeshError, match="the distribution that is set is over"):
            parallelize(mlp(), Mesh((2, 1), ("data", "model")), {})
        with pytest.raises(RuleError, match=r"'0\.wight' matches no parameter.*'0\.weight'"):
            parallelize(mlp(), mesh, {"0.wight": ("model", None)})
        with pytest.raises(RuleError, match=r"'0\.weight' matches multiple"):
            parallelize(mlp(), mesh, {r"0\.w.*": ("model", None), r"0\..*t": (None, "model")})
        with pytest.raises(LayoutError, match=r"Rule '0\.bias'.*shape \(8,\)"):
            parallelize(mlp(), mesh, {"0.bias": ("model", None)})
        with pytest.raises(LayoutError, match=r"Rule '0\.bias': .*nowhere"):
            parallelize(mlp(), mesh, {"0.bias": ("nowhere",)})
        tied = Text()
        twice = {"table.weight": ("model", None), "logits.weight": (None, None)}
        with pytest.raises(RuleError, match=r"'table\.weight', 'logits\.weight'.*keep one"):
            parallelize(tied, mesh, twice)
        assert placements(tied.table.weight) == "plain"  # nothing is done by halves
        laid_out = parallelize(mlp(), mesh, MEGATRON)
        with pytest.raises(StrategyError, match=r"'0\.weight' is already laid out"):
            parallelize(laid_out, mesh, MEGATRON)
        with warnings.catch_warnings(action="ignore"):  # torch's, that TorchScript is old
            script = torch.jit.script(mlp())
        with pytest.raises(StrategyError, match=r"'0\.weight' of .* cannot be laid out"):
            wrapped(script)
        distribute((1, 2), {"mlp/0/weight": (None, "model")})
        with pytest.raises(LayoutError, match=r"Rule 'mlp/0/weight' of the layout map"):
            wrapped(laid_out)

    run_ranks(program, 2)


def test_the_code_of_the_document_runs():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "torch-modules.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def program(rank):
        names = {}
        exec("\n".join(blocks), names)
        return [placements(parameter) for parameter in names["module"].parameters()]

    assert run_ranks(program, 2)[0] == ["R S(0)", "R S(0)", "R S(1)", "R R"]


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
