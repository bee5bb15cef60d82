"""Programs that found something: a test runs each of them."""

from tests.fuzz.programs import Event, Program

# By what they found.
FOUND: dict[str, Program] = {
    "a captured step does not see whether sample weights are an array": Program(
        events=(Event("train", times=4), Event("fit_source", times=4, value=1)),
        step="own",
        weighted=True,
        capture="audit",
    ),
}
