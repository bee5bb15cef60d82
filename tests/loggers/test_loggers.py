"""Loggers of Keras, Weights & Biases and MLflow, offline: one rank writes, and what `fit` returned.

The programs are those of docs/how-to/loggers.md. `make loggers` runs them.
"""

import csv
import json
import re
import struct
from pathlib import Path

import pytest

from tests import warm

tf = pytest.importorskip("tensorflow")
mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")
# Imported before ranks are forked: TensorFlow takes seconds.
pytest.importorskip("mlflow.keras")
pytest.importorskip("wandb.integration.keras")
internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")

# Of Keras, TensorFlow, Weights & Biases and MLflow; none is ours.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md"
BLOCKS = re.findall(r"^```python.*?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
SETUP, OF_KERAS, OF_WANDB, OF_MLFLOW = BLOCKS
AUTOLOG = OF_MLFLOW.replace(
    "    loggers = [mlflow.keras.MlflowCallback()]", "    mlflow.keras.autolog(log_models=False)"
)
# Each step runs a callback of rank 0 alone.
BY_STEPS = OF_MLFLOW.replace("Callback()", "Callback(log_every_epoch=False, log_every_n_steps=1)")
PRINT = "\nimport json\nprint('HISTORY', json.dumps(history.history))\n"
FIGURES = {"samples_per_second", "step_ms", "data_wait", "peak_memory_mib", "collective_mib"}
EPOCHS = 3


def run(block, folder, ranks):
    """Runs a program of the page on each rank in one folder; gives the output of each."""
    folder.mkdir(parents=True, exist_ok=True)
    private = {f"WANDB_{name}_DIR": str(folder / "private") for name in ("CACHE", "CONFIG", "DATA")}
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder / "private"),
        "WANDB_SILENT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "SHARDCORE_CAPTURE": "at-once",
        **private,
    }
    words = ["-c", SETUP + block + PRINT]
    if ranks == 1:
        programs = [warm.Program(words, environment, folder)]
    else:
        programs = warm.start_ranks(words, ranks, environment, folder)
    return [(program.communicate(180), program.wait(0)) for program in programs]


def histories(block, folder, ranks):
    """Runs a program on each rank; gives what `fit` returned on each."""
    found = []
    for (out, err), code in run(block, folder, ranks):
        assert code == 0, out + err
        found.append(json.loads(re.findall(r"^HISTORY (.*)$", out, re.MULTILINE)[0]))
    return found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The losses of one device, without a logger."""
    plain = "history = model.fit(x, y, epochs=3, verbose=0)"
    ((history),) = histories(plain, tmp_path_factory.mktemp("plain") / "one", 1)
    return history["loss"]


def trained(block, folder, losses):
    """Trains on two ranks, compares with one device, and gives what `fit` returned on rank 0."""
    of_ranks = histories(block, folder, 2)
    for history in of_ranks:
        assert history["loss"] == pytest.approx(losses, rel=1e-5)
        assert history.keys() >= FIGURES
        assert len(history["loss"]) == EPOCHS
    assert of_ranks[0]["step_ms"] != of_ranks[1]["step_ms"]  # the files can tell the ranks apart
    return of_ranks[0]


def test_csv_logger_and_tensorboard(tmp_path, one_device):
    history = trained(OF_KERAS, tmp_path / "two", one_device)
    with open(tmp_path / "two" / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name, values in history.items():
        assert [float(row[name]) for row in rows] == values
    (events,) = (tmp_path / "two" / "board").rglob("events.*")  # of one process
    shown = {}
    for event in tf.compat.v1.train.summary_iterator(str(events)):
        for value in event.summary.value:
            shown.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor))
    for name, values in history.items():
        assert shown[f"epoch_{name}"] == pytest.approx(values, rel=1e-6)  # float32


def records(file):
    """The records of a run of Weights & Biases: a log of LevelDB, in blocks of 32 KiB."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of it, or its last part
            yield internal.Record.FromString(record)
            record = b""


def runs_of_wandb(folder):
    return [file for file in folder.rglob("*.wandb") if "latest-run" not in file.parts]


@pytest.mark.parametrize("log_freq", ["", "log_freq=1"])
def test_wandb_metrics_logger_and_model_checkpoint(tmp_path, one_device, log_freq):
    block = OF_WANDB.replace("WandbMetricsLogger()", f"WandbMetricsLogger({log_freq})")
    history = trained(block, tmp_path / "two", one_device)
    (file,) = runs_of_wandb(tmp_path / "two")
    logged, files = {}, []
    for record in records(file):
        if record.HasField("history"):
            for item in record.history.item:
                logged.setdefault(item.key or item.nested_key[0], []).append(item.value_json)
        files += [entry.path for entry in record.artifact.manifest.contents]
    for name, values in history.items():
        assert [json.loads(text) for text in logged[f"epoch/{name}"]] == values
    if log_freq:
        assert len(logged["batch/loss"]) == len(logged["batch/step_ms"]) == EPOCHS * 16
    assert files == ["digits.keras"] * EPOCHS
    assert (tmp_path / "two" / "digits.keras").exists()


def runs_of_mlflow(folder):
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    return mlflow.search_runs(search_all_experiments=True, output_format="list")


@pytest.mark.parametrize("block", [OF_MLFLOW, BY_STEPS, AUTOLOG], ids=["epochs", "steps", "auto"])
def test_mlflow_callback(tmp_path, one_device, block):
    history = trained(block, tmp_path / "two", one_device)
    (logged,) = runs_of_mlflow(tmp_path / "two")
    assert logged.data.params["optimizer_name"] == "adam"
    client = mlflow.MlflowClient()
    for name, values in history.items():
        metrics = client.get_metric_history(logged.info.run_id, name)
        in_order = [metric.value for metric in sorted(metrics, key=lambda metric: metric.step)]
        if block == BY_STEPS:
            assert len(in_order) == EPOCHS * 16
        else:
            assert in_order == values
    names = {file.name for file in (tmp_path / "two" / "mlruns").rglob("*") if file.is_file()}
    assert names == {"digits.keras", "model_summary.txt"}


WRONG = {
    "WandbMetricsLogger": (OF_WANDB, 'mode="disabled"'),
    "MlflowCallback": (OF_MLFLOW, "if shardcore.status().rank == 0"),
    "autolog": (AUTOLOG, "autolog(log_models=False)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_of_each_rank_is_an_error_on_all_before_the_first_step(tmp_path, name):
    block, remedy = WRONG[name]
    block = block.replace("mlflow.start_run()", "pass")  # the callback would start one
    assert runs_of_mlflow(tmp_path) == []  # makes the database, which only one process may
    for (out, err), code in run("is_rank_0 = True\n" + block, tmp_path, 2):
        assert code != 0
        assert "HISTORY" not in out
        assert "would log a separate run on each of ranks 0, 1" in err
        assert remedy in err


def test_a_group_of_wandb_has_a_run_of_each_rank(tmp_path):
    block = OF_WANDB.replace('"digits",', '"digits", group="ranks",')
    assert len(histories("is_rank_0 = True\n" + block, tmp_path / "two", 2)) == 2
    assert len(runs_of_wandb(tmp_path / "two")) == 2


# Callbacks of Weights & Biases that no test runs, with the reason.
NOT_RUN = {"WandbEvalCallback": "a base class: its methods are the user's"}

# The tests of each callback that docs/reference/callbacks.md lists, by the package of its maker.
TESTED = {
    ("keras", "CSVLogger"): test_csv_logger_and_tensorboard,
    ("keras", "TensorBoard"): test_csv_logger_and_tensorboard,
    ("wandb", "WandbMetricsLogger"): test_wandb_metrics_logger_and_model_checkpoint,
    ("wandb", "WandbModelCheckpoint"): test_wandb_metrics_logger_and_model_checkpoint,
    ("mlflow", "MlflowCallback"): test_mlflow_callback,
    ("mlflow", "autolog"): test_mlflow_callback,
}


def test_every_callback_of_wandb_has_a_test_or_a_reason():
    tested = {name for package, name in TESTED if package == "wandb"}
    assert set(wandb.integration.keras.__all__) == tested | NOT_RUN.keys()
