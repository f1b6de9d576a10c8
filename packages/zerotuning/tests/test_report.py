from tiny_task import answers, examples
from zerotuning.evaluation import compare
from zerotuning.report import verdict_line


def test_verdicts_are_honest():
    data = examples(24)
    right, wrong = (0, 1) * 12, (1, 0) * 12
    unparsed = (-1,) * 24

    def line(vanilla, tuned):
        return verdict_line(compare(data, vanilla, tuned))

    assert line(answers(wrong), answers(right)).startswith("It helped: accuracy +1.000")
    assert "by format" in line(answers(unparsed, right), answers(right))
    assert line(answers(right), answers(wrong)).startswith("It hurt: accuracy -1.000")
    assert line(answers(right), answers(right)).startswith("No difference shown")
