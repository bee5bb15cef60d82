"""The probe of `make compat` looks up every private name of Keras that the patches import."""

from tests.compat import probe


def test_this_keras_has_every_one():
    assert list(probe.moved_names_of_keras()) == []


def test_a_name_that_moved_is_named(monkeypatch, tmp_path):
    source = "from keras.src.gone import a\nfrom keras.src.backend import gone, common, floatx\n"
    (tmp_path / "patches.py").write_text(source)
    monkeypatch.setattr(probe, "PRIVATE", tmp_path)
    assert list(probe.moved_names_of_keras()) == [
        "Keras has no keras.src.gone:a",
        "Keras has no keras.src.backend:gone",
    ]
