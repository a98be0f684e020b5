"""For foreign.sh: pytest writes NAME<tab>OUTCOME for each test to the file $FOREIGN_RESULTS, as soon as it has ended."""
import os

outcomes = {}


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started it writes
        return
    name, outcome = report.nodeid, report.outcome
    if outcome == "failed" and report.when in ("setup", "teardown"):
        outcome = "error"
    if report.when == "call" or outcome != "passed":
        outcomes[name] = outcome
    if report.when in ("teardown", "???"):  # ???: the worker that ran it has crashed
        with open(os.environ["FOREIGN_RESULTS"], "a") as results:
            print(name.replace("\t", " ").replace("\n", " "), outcomes.pop(name, "passed"), sep="\t", file=results)
