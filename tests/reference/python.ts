/**
 * The reference Python: an interpreter with PyTorch, transformers, PEFT, MLflow and the other packages of requirements.txt,
 * for tests that start from plain Hugging Face folders or let those packages read what mimo wrote. `install.sh` of this folder
 * puts it into build/reference; MIMO_PYTHON names another interpreter. In .ci/run, which installs it, its absence is a failure.
 *
 *   const python = referencePython("transformers");
 *   test.skipIf(python === null)("…", () => expect(runPython(python!, ["-c", script, folder])).toBe("…\n"));
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { absent } from "../absent.ts";

const installed = join(import.meta.dir, "../../build/reference/bin/python");

/** Path of an interpreter that can import the packages; null, after a printed skip, without one. */
export function referencePython(...packages: readonly string[]): string | null {
	const python = process.env.MIMO_PYTHON ?? (existsSync(installed) ? installed : null);
	const missing = python === null ? [] : packages.filter((name) => !canImport(python, name));
	if (python !== null && missing.length === 0) return python;
	return absent(
		python === null ? "the reference Python" : `${missing.join(", ")} for ${python}`,
		"bash tests/reference/install.sh",
	);
}

/** Looks for the package without importing it, which takes seconds for some. */
function canImport(python: string, name: string): boolean {
	const script = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)";
	return Bun.which(python) !== null && Bun.spawnSync([python, "-c", script, name]).success;
}

/** Environment of the interpreter. What it compiles of its packages, it keeps: PyTorch and transformers take it half a minute. */
export const pythonEnvironment = { ...process.env, PYTHONDONTWRITEBYTECODE: "" };

/** Standard output of the interpreter, without access to Hugging Face's hub; an error with its messages when it fails. */
export function runPython(python: string, args: readonly string[], options: { readonly cwd?: string } = {}): string {
	const { exitCode, stdout, stderr } = Bun.spawnSync([python, ...args], {
		...options,
		env: { ...pythonEnvironment, HF_HUB_OFFLINE: "1", MLFLOW_ALLOW_FILE_STORE: "true" },
		stdin: "ignore",
		stdout: "pipe",
		stderr: "pipe",
	});
	if (exitCode !== 0) throw new Error(`${python} ended with ${exitCode}:\n${stdout}${stderr}`);
	return stdout.toString();
}
