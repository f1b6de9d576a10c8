from tiny_task import examples
from zerotuning.evaluation import Predictions, compare
from zerotuning.report import verdict_line


def test_verdicts_are_honest():
    data = examples(24)
    right, wrong = (0, 1) * 12, (1, 0) * 12
    unparsed = (-1,) * 24

    def line(vanilla, tuned):
        return verdict_line(compare(data, vanilla, tuned))

    assert line(Predictions(wrong, wrong), Predictions(right, right)).startswith("It helped: accuracy +1.000")
    assert "by format" in line(Predictions(unparsed, right), Predictions(right, right))
    assert line(Predictions(right, right), Predictions(wrong, wrong)).startswith("It hurt: accuracy -1.000")
    assert line(Predictions(right, right), Predictions(right, right)).startswith("No difference shown")
