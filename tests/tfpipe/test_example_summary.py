import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tfpipe.test_examples import LISTS
from tfpipe.errors import SchemaError
from tfpipe.example_summary import ExampleSummary
from tfpipe.examples import Place

tf = pytest.importorskip("tensorflow")


def summarize(payloads, start=0):
    summary = ExampleSummary()
    for number, payload in enumerate(payloads, start):
        summary.add(payload, Place("a", number))
    return summary


def outcome(summary):
    schema, notices = summary.infer()
    return schema, notices, summary.statistics(schema)


def payloads_of(features):
    return [tf.train.Example(features=tf.train.Features(feature=f)).SerializeToString() for f in features]


@given(st.lists(st.dictionaries(st.sampled_from("ab"), LISTS), max_size=12), st.integers(0, 12))
@settings(deadline=None)
def test_merged_parts_say_what_the_whole_says(records, at):
    payloads = payloads_of(records)
    try:
        whole = outcome(summarize(payloads))
    except SchemaError:
        with pytest.raises(SchemaError):
            part = summarize(payloads[:at])
            part.merge(summarize(payloads[at:], at))
            outcome(part)
        return
    part = summarize(payloads[:at])
    part.merge(summarize(payloads[at:], at))
    schema, notices, statistics = outcome(part)
    assert (schema, notices) == whole[:2]
    for name, expected in whole[2].items():
        found = statistics[name]
        if "mean" in expected:  # sums of floats differ by their order, as far as the largest value
            scale = max(abs(expected["min"]), abs(expected["max"]))
            assert found.pop("mean") == pytest.approx(expected.pop("mean"), rel=0, abs=1e-9 * scale)
        assert found == expected
