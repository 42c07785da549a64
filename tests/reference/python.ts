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

/** Variables of the tests' programs: Hugging Face's hub is not asked. */
const programEnvironment = { ...pythonEnvironment, HF_HUB_OFFLINE: "1", MLFLOW_ALLOW_FILE_STORE: "true" };

/**
 * Starts server.py, whose programs share one import of the packages: 5 seconds of a processor that each would take. The tests of
 * this process and its children ask it; null, where there is no reference Python.
 */
export async function startReference(socket: string): Promise<Bun.Subprocess | null> {
	const python = process.env.MIMO_PYTHON ?? installed;
	if (!existsSync(python)) return null;
	const command = [python, join(import.meta.dir, "server.py"), socket];
	const server = Bun.spawn(command, { env: programEnvironment, stdin: "ignore", stdout: "ignore", stderr: "inherit" });
	while (!existsSync(socket) && server.exitCode === null) await Bun.sleep(10);
	if (server.exitCode !== null) return null;
	process.env.MIMO_REFERENCE = socket;
	return server;
}

/** Standard output of the interpreter, without access to Hugging Face's hub; an error with its messages when it fails. */
export async function runPython(
	python: string,
	args: readonly string[],
	{ cwd = process.cwd() }: { readonly cwd?: string } = {},
): Promise<string> {
	const { exitCode, stdout, stderr } = await ended(python, { args, cwd, env: programEnvironment });
	if (exitCode !== 0) throw new Error(`${python} ended with ${exitCode}:\n${stdout}${stderr}`);
	return stdout;
}

interface Program {
	readonly args: readonly string[];
	readonly cwd: string;
	readonly env: NodeJS.ProcessEnv;
}

interface Ended {
	readonly exitCode: number;
	readonly stdout: string;
	readonly stderr: string;
}

async function ended(python: string, { args, cwd, env }: Program): Promise<Ended> {
	const server = process.env.MIMO_REFERENCE;
	if (server !== undefined) {
		const request = { method: "POST", body: JSON.stringify({ args, cwd, env }), unix: server, timeout: false };
		return (await (await fetch("http://localhost/", request as RequestInit)).json()) as Ended;
	}
	const child = Bun.spawn([python, ...args], { cwd, env, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
	const [stdout, stderr, exitCode] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
	return { exitCode, stdout, stderr };
}
