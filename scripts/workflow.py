"""Executes GitHub workflows and composite actions on this machine, as far as those of this repository go.

Expressions are evaluated, `run` steps executed by bash as a runner does, and the few actions that are used stand for
themselves in a folder: caches, artifacts, checkouts. What it does not know it refuses. Needs PyYAML.
"""

import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess

import yaml

TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>\d+)|(?P<name>[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)(?P<call>\(\))?"
    r"|(?P<sign>&&|\|\||==|!=|!|\(|\)))"
)
SIGNS = {"&&": " and ", "||": " or ", "!": " not ", "==": "==", "!=": "!=", "(": "(", ")": ")"}
# One per line, as a runner writes them; values here have one line.
OUTPUT = re.compile(r"([A-Za-z_][\w-]*)=(.*)")


class Unknown(Exception):
    """A part of a workflow that this program does not know."""


def evaluate(expression, context):
    """The value of what stands between `${{` and `}}`."""
    python, place = "", 0
    while place < len(expression.rstrip()):
        token = TOKEN.match(expression, place)
        if not token:
            raise Unknown(f"expression: {expression}")
        place = token.end()
        if token["text"]:
            python += repr(token["text"][1:-1].replace("''", "'"))
        elif token["number"]:
            python += token["number"]
        elif token["name"]:
            python += repr(lookup(token["name"] + (token["call"] or ""), context))
        else:
            python += SIGNS[token["sign"]]
    return eval(python.strip(), {"__builtins__": {}})  # of literals and signs alone


def lookup(name, context):
    literals = {"true": True, "false": False, "null": None, "always()": True}
    if name in literals:
        return literals[name]
    if name == "success()":
        return not context["failed"]
    if name == "failure()":
        return context["failed"]
    value = context
    for part in name.split("."):
        if not isinstance(value, dict):
            raise Unknown(f"{name}")
        # What a context lacks is empty.
        value = value.get(part)
        if value is None:
            return None
    return value


def as_text(value):
    # By identity: 1 is equal to True.
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def fill(text, context):
    """A text with its expressions replaced by their values."""
    return re.sub(r"\$\{\{(.*?)\}\}", lambda match: as_text(evaluate(match[1], context)), as_text(text))


class Machine:
    """What outlives a job: caches and artifacts; and what a job prints."""

    def __init__(self, folder, own, environment=()):
        self.folder, self.own = pathlib.Path(folder), own
        self.caches, self.artifacts = self.folder / "caches", self.folder / "artifacts"
        self.environment = dict(environment)
        self.printed, self.summary, self.jobs = "", "", 0
        self.alerts = []
        self.default_branch, self.branch, self.event = "main", "main", "push"

    def job(self, steps, workspace, context):
        """Executes steps; returns (whether all succeeded, the outputs of steps)."""
        self.jobs += 1
        temporary = self.folder / f"job-{self.jobs}"
        temporary.mkdir(parents=True)
        github = {
            "token": "none", "run_id": str(1000 + self.jobs), "run_attempt": "1", "ref_name": self.branch,
            "event_name": self.event,
            "action_repository": "owner/parity",
            "event": {"repository": {"default_branch": self.default_branch}},
        }
        context = {"github": github, "runner": {"os": "Linux"}, "env": {}, **context}
        return self.steps(steps, pathlib.Path(workspace), temporary, context, None)

    def steps(self, steps, workspace, temporary, context, action):
        context = {**context, "steps": {}, "failed": False}
        for number, step in enumerate(steps):
            condition = as_text(step.get("if", "success()"))
            condition = re.sub(r"^\s*\$\{\{(.*)\}\}\s*$", r"\1", condition)
            if not re.search(r"\b(always|success|failure)\(\)", condition):
                condition = f"success() && ({condition})"
            if not evaluate(condition, context):
                continue
            if "run" in step:
                code, outputs = self.run(step, workspace, temporary, context, action)
            else:
                code, outputs = self.use(step, workspace, temporary, context)
            context["steps"][step.get("id", f"step-{number}")] = {"outputs": outputs}
            context["failed"] |= code != 0 and not step.get("continue-on-error", False)
        return not context["failed"], {name: step["outputs"] for name, step in context["steps"].items()}

    def run(self, step, workspace, temporary, context, action):
        if step.get("shell", "bash" if action is None else None) != "bash":
            raise Unknown(f"a step of an action names its shell, here bash: {step}")
        files = {name: temporary / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        script = temporary / "script.sh"
        script.write_text(fill(step["run"], context))
        environment = {
            **os.environ, **self.environment, **{name: str(file) for name, file in files.items()},
            "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(workspace), "RUNNER_TEMP": str(temporary),
            "RUNNER_OS": "Linux", "RUNNER_ARCH": "X64", **({"GITHUB_ACTION_PATH": str(action)} if action else {}),
            **{name: fill(value, context) for name, value in step.get("env", {}).items()},
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(command, cwd=workspace, env=environment, text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.printed += done.stdout
        self.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        return done.returncode, dict(OUTPUT.fullmatch(line).groups() for line in files["GITHUB_OUTPUT"].read_text().splitlines())

    def use(self, step, workspace, temporary, context):
        name, _, version = step["uses"].partition("@")
        inputs = {key: fill(value, context) for key, value in step.get("with", {}).items()}
        if name in ("./", ".") or name.rpartition("/")[2] == self.own.name and name.count("/") == 1 and "actions" not in name:
            return self.action(self.own.path, inputs, workspace, temporary, context)
        if not version:
            raise Unknown(f"{step['uses']}: no version")
        known = {
            "actions/checkout": lambda: 0,
            "actions/cache/restore": lambda: self.restore(inputs, workspace),
            "actions/cache/save": lambda: self.copy(workspace / inputs["path"], self.caches / inputs["key"].replace("/", "%"), "cache"),
            "actions/upload-artifact": lambda: self.copy(workspace / inputs["path"], self.artifacts / inputs["name"], "artifact"),
            "actions/download-artifact": lambda: self.download(inputs, workspace),
            "github/codeql-action/upload-sarif": lambda: self.scan(workspace / inputs["sarif_file"]),
        }
        if name not in known:
            raise Unknown(step["uses"])
        return known[name](), {}

    def action(self, path, inputs, workspace, temporary, context):
        definition = yaml.safe_load((path / "action.yml").read_text())
        unknown = set(inputs) - set(definition["inputs"])
        if unknown:
            raise Unknown(f"inputs: {sorted(unknown)}")
        given = {name: as_text(inputs.get(name, entry.get("default", ""))) for name, entry in definition["inputs"].items()}
        inside = {name: context[name] for name in ("github", "runner", "env")}
        whole, steps = self.steps(definition["runs"]["steps"], workspace, temporary, {**inside, "inputs": given}, path)
        reached = {"steps": {name: {"outputs": outputs} for name, outputs in steps.items()}, "failed": False}
        outputs = {name: fill(entry["value"], reached) for name, entry in definition["outputs"].items()}
        return (0 if whole else 1), outputs

    def copy(self, source, target, what):
        if not source.exists():
            self.printed += f"no {what}: {source.name} is not there\n"
            return 0
        if target.exists():
            self.printed += f"the {what} {target.name} exists already\n"
            return 1 if what == "artifact" else 0
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        return 0

    def scan(self, file):
        """What code scanning takes: results with a rule, a message, and a file that stands for their place."""
        log = json.loads(file.read_text())
        for result in (result for run in log["runs"] for result in run["results"]):
            place = result["locations"][0]
            assert place["physicalLocation"]["artifactLocation"]["uri"] and result["message"]["text"]
            self.alerts.append((result["level"], result["ruleId"], place["logicalLocations"][0]["fullyQualifiedName"]))
        return 0

    def restore(self, inputs, workspace):
        prefix = inputs["restore-keys"].replace("/", "%")
        found = sorted(self.caches.glob(f"{prefix}*"), key=lambda path: path.stat().st_mtime_ns)
        if found:
            shutil.copy(found[-1], workspace / inputs["path"])
        return 0

    def download(self, inputs, workspace):
        for artifact in sorted(self.artifacts.iterdir()) if self.artifacts.exists() else []:
            if fnmatch.fnmatch(artifact.name, inputs.get("pattern", "*")):
                shutil.copytree(artifact, workspace / inputs["path"] / artifact.name)
        return 0

    def workflow(self, file, workspace_of, lost=()):
        """Executes the jobs of a workflow; `lost` names those that a runner never finished, such as `shard-2`.

        Returns job -> whether it succeeded, one for each entry of a matrix.
        """
        results = {}
        jobs = yaml.safe_load(pathlib.Path(file).read_text())["jobs"]
        for name, job in jobs.items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            before = [result for other, result in results.items() if any(other.startswith(need) for need in needs)]
            if not all(before) and "always()" not in as_text(job.get("if", "")):
                results[name] = False
                continue
            matrix = job.get("strategy", {}).get("matrix", {})
            if len(matrix) > 1:
                raise Unknown(f"{name}: a matrix of {len(matrix)} axes")
            entries = [{axis: value} for axis, values in matrix.items() for value in values] or [{}]
            for entry in entries:
                label = "-".join([name, *map(str, entry.values())])
                if label in lost:
                    results[label] = False
                    continue
                context = {"matrix": entry, "strategy": {"job-total": len(entries)}}
                results[label] = self.job(job["steps"], workspace_of(label), context)[0]
        return results
