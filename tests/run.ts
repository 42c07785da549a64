/**
 * The test runner behind `npm test`: every tests/**\/*.test.ts in a process of its own, so that a crash of the native
 * library names its file. At most two files run at a time, and beside them a file that mostly waits; a third file takes the
 * place of these once they are done and the processors have no release to build. Files that measure time run last, one at a
 * time.
 *
 * Files that need a release build come at the end: where MIMO_RELEASE_LOG names a file, they wait for its last line, "done" or
 * "failed" (.ci/run).
 *
 *   bun tests/run.ts [--full] [--sanitize] [PART OF A PATH ...]
 *
 * --full: more steps, cases and sizes, and some longer tests (MIMO_TEST_FULL=1). --sanitize: with the ASan/UBSan library of
 * `bun build.ts sanitize`. The last line is "N passed, N failed" (and ", N skipped"); the exit code is 1 after a failure.
 */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { availableParallelism, tmpdir } from "node:os";
import { join, relative } from "node:path";
import { parseArgs } from "node:util";
import { startReference } from "./reference/python.ts";
import { sanitizerEnvironment } from "./sanitizer.ts";

const root = join(import.meta.dir, "..");
const { values: flags, positionals: filters } = parseArgs({
	options: { full: { type: "boolean", default: false }, sanitize: { type: "boolean", default: false } },
	allowPositionals: true,
});

/** Most seconds of a file. The sanitizers slow tests down about three times. */
const fileLimit = (flags.full ? 3600 : 360) * (flags.sanitize ? 3 : 1);
/** Most seconds of a single test. */
const testLimit = fileLimit / 2;

interface Outcome {
	readonly file: string;
	readonly passed: number;
	readonly failed: number;
	readonly skipped: number;
	readonly seconds: number;
	/** Processor time of the process and of the children that it has waited for. */
	readonly processorSeconds: number;
	/** A failure of the file itself: a crash, a time-out, no test; null otherwise. */
	readonly problem: string | null;
	readonly output: string;
}

/** Files that wait at least as long as they compute: for ranks that fall silent, for Slurm, for locks, for servers. */
const waiting = [
	"tests/launch/launcher.test.ts",
	"tests/native/cpp.test.ts",
	"tests/attack/attackers.test.ts",
	"tests/data/energon-tool.test.ts",
	"tests/e2e/save-folder.test.ts",
	"tests/e2e/stuck-data.test.ts",
	"tests/data/storage/timeouts.test.ts",
	"tests/launch/torchrun.test.ts",
	"tests/launch/authentication.test.ts",
	"tests/launch/hosts.test.ts",
	"tests/checkpoint/native/writer-lock.test.ts",
	"tests/e2e/slurm.test.ts",
	"tests/e2e/slurm-recipes.test.ts",
	"tests/e2e/plain-folders.test.ts",
	"tests/e2e/stores.test.ts",
];
/** Files that look at dist/release or its libraries. */
const ofRelease = [
	"tests/build/packages.test.ts",
	"tests/build/release.test.ts",
	"tests/e2e/cuda-library.test.ts",
	"tests/e2e/empty-machine.test.ts",
];
/** Longest computations, with their seconds of processor time. They start first, so that no core is idle at the end. */
const long = [
	"tests/e2e/verify.test.ts", // 60
	"tests/e2e/fine-tune.test.ts", // 60
	"tests/e2e/host-restarts.test.ts", // 50
	"tests/guests/elastic/commands.test.ts", // 55
	"tests/e2e/vision-language-weights.test.ts", // 45
	"tests/e2e/checkpoints.test.ts", // 45
	"tests/e2e/energon-train.test.ts", // 45
	"tests/e2e/vision-language.test.ts", // 40
	"tests/e2e/killed-saves.test.ts", // 40
	"tests/e2e/checkpoint-failures.test.ts", // 35
	"tests/inference/generate.test.ts", // 35
	"tests/parallel/language.test.ts", // 35
	"tests/fuzz/fuzz.test.ts", // 30
	"tests/parallel/mimo.test.ts", // 30
	"tests/e2e/reference-layouts/fixed.test.ts", // 25
	"tests/inference/evaluate.test.ts", // 25
	"tests/attack/configurations.test.ts", // 20
	"tests/e2e/reference-layouts/participation.test.ts", // 20
	"tests/native/transformers-images.test.ts", // 20
	"tests/e2e/reference-layouts/dynamic.test.ts", // 20
	"tests/native/image-bounds.test.ts", // 20
	"tests/parity/mimo.test.ts", // 15
	"tests/e2e/trackers.test.ts", // 15
	"tests/e2e/train.test.ts", // 15
	"tests/data/tokenizer-bounds.test.ts", // 15
	"tests/e2e/fine-tune-pictures.test.ts", // 15
	"tests/commands/plan.test.ts", // 15
	"tests/e2e/sanitizer.test.ts", // 10
];
/** Files that check times or rates. */
const measuring = [
	...["data-scale", "doctor-nodes", "launch", "random-ends", "timers"].map((name) => `tests/e2e/${name}.test.ts`),
	"tests/observe/report.test.ts",
];

/** Files whose programs compute for long in JavaScript. */
const computing = ["tests/fuzz/fuzz.test.ts"];

/**
 * Calls and loops after which JavaScriptCore compiles a function anew with its optimising compilers, later than by default:
 * most processes of the tests end within seconds, before optimised code pays for its compilation, and those that a test
 * starts do without (plain-children.ts). --full and files that measure keep the defaults.
 */
const lateOptimisation = Object.fromEntries(
	["AfterWarmUp", "Soon", "AfterLongWarmUp"].map((when) => [`BUN_JSC_thresholdForOptimize${when}`, "20000"]),
);

const running = new Set<number>();

async function runFile(file: string): Promise<Outcome> {
	const started = performance.now();
	const usual = flags.full || measuring.includes(file);
	const preload = usual || computing.includes(file) ? [] : ["--preload=./tests/plain-children.ts"];
	const child = Bun.spawn([process.execPath, "test", `--timeout=${testLimit * 1000}`, ...preload, `./${file}`], {
		cwd: root,
		env: {
			...process.env,
			NO_COLOR: "1",
			...(flags.full && { MIMO_TEST_FULL: "1" }),
			...(!usual && lateOptimisation),
			...(flags.sanitize ? sanitizerEnvironment(root) : {}),
		},
		stdin: "ignore",
		stdout: "pipe",
		stderr: "pipe",
		// A process group of its own: endGroup also ends the processes that a test has started.
		detached: true,
	});
	running.add(child.pid);
	let late = false;
	const timer = setTimeout(() => {
		late = true;
		endGroup(child.pid);
	}, fileLimit * 1000);
	const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
	clearTimeout(timer);
	endGroup(child.pid);
	running.delete(child.pid);
	const output = stderr + stdout;
	const count = (word: string) =>
		Number([...output.matchAll(new RegExp(`^\\s*(\\d+) ${word}$`, "gm"))].at(-1)?.[1] ?? 0);
	const counts = { passed: count("pass"), failed: count("fail"), skipped: count("skip") + count("todo") };
	const finished = /^Ran \d+ tests? across/m.test(output);
	let problem: string | null = null;
	if (late) problem = `still running after ${fileLimit} s`;
	else if (!finished || child.signalCode)
		problem = `ended early (${child.signalCode ?? `exit code ${child.exitCode}`})`;
	else if (counts.passed + counts.failed + counts.skipped === 0) problem = "holds no test";
	else if (child.exitCode !== 0 && counts.failed === 0) problem = `exit code ${child.exitCode}`;
	const seconds = (performance.now() - started) / 1000;
	const processorSeconds = processorSecondsOf(child);
	return {
		file,
		...counts,
		failed: counts.failed + (problem === null ? 0 : 1),
		seconds,
		processorSeconds,
		problem,
		output,
	};
}

function processorSecondsOf(ended: Bun.Subprocess): number {
	return Number(ended.resourceUsage()?.cpuTime.total ?? 0) / 1e6;
}

/** Kills a test process and the processes that it has started. */
function endGroup(pid: number): void {
	try {
		process.kill(-pid, "SIGKILL");
	} catch {
		// No process of the group is left.
	}
}

function report(outcome: Outcome): void {
	const { file, passed, failed, skipped, seconds, processorSeconds, problem, output } = outcome;
	if (failed > 0) {
		const lines = output.split("\n").filter((line) => !/^\((pass|skip|todo)\)/.test(line));
		console.log(`FAILED ${file}${problem === null ? "" : `: ${problem}`}\n${lines.join("\n").trim()}\n`);
		return;
	}
	const left = skipped > 0 ? `, ${skipped} skipped` : "";
	console.log(
		`ok ${file}: ${passed} passed${left} (${seconds.toFixed(1)} s, ${processorSeconds.toFixed(1)} s of processors)`,
	);
	for (const line of new Set(output.match(/^skip: .*$/gm) ?? [])) console.log(`   ${line}`);
}

/** Runs the files, `width` at a time, and in one more lane the files of `beside`, then others as well, reporting each as it ends. */
async function runAll(files: readonly string[], width: number, beside: readonly string[] = []): Promise<Outcome[]> {
	const queue = [...files];
	const outcomes: Outcome[] = [];
	const run = async (queue: string[]) => {
		for (let file = queue.shift(); file !== undefined; file = queue.shift()) {
			const outcome = await runFile(file);
			outcomes.push(outcome);
			report(outcome);
		}
	};
	const runBeside = async () => {
		await run([...beside]);
		while (queue.length > 0 && !(await releaseIsBuilt())) await Bun.sleep(1000);
		await run(queue);
	};
	const lanes = Array.from({ length: width }, () => run(queue));
	await Promise.all(beside.length > 0 ? [...lanes, runBeside()] : lanes);
	return outcomes;
}

/** Whether the release build that MIMO_RELEASE_LOG tells of has ended; without it none is running. */
async function releaseIsBuilt(): Promise<boolean> {
	const log = process.env.MIMO_RELEASE_LOG;
	return log === undefined || /\n(done|failed)\n$/.test(await Bun.file(log).text());
}

for (const signal of ["SIGINT", "SIGTERM"] as const) {
	process.on(signal, () => {
		for (const pid of running) endGroup(pid);
		process.exit(130);
	});
}

const files = [...new Bun.Glob("tests/**/*.test.ts").scanSync(root)]
	.map((file) => relative(root, join(root, file)))
	.filter((file) => filters.length === 0 || filters.some((filter) => file.includes(filter)))
	.sort();
if (files.length === 0) {
	console.log(`No test file matches ${filters.join(", ")}.\n0 passed, 1 failed`);
	process.exit(1);
}
const started = performance.now();
const folder = mkdtempSync(join(tmpdir(), "mimo-tests-"));
const asksReference = files.some((file) => readFileSync(join(root, file), "utf8").includes("reference/python.ts"));
const reference = asksReference && !flags.sanitize ? await startReference(join(folder, "reference")) : null;
const alone = files.filter((file) => measuring.includes(file));
const beside = waiting.filter((file) => files.includes(file));
const last = ofRelease.filter((file) => files.includes(file));
const first = long.filter((file) => files.includes(file));
const apart = new Set([...alone, ...beside, ...last]);
const together = [...new Set([...first, ...files])].filter((file) => !apart.has(file));
const width = Math.min(2, availableParallelism());
const outcomes = await runAll(together, width, beside);
while (last.length > 0 && !(await releaseIsBuilt())) await Bun.sleep(1000);
outcomes.push(...(await runAll(last, width)), ...(await runAll(alone, 1)));
reference?.kill();
await reference?.exited;
rmSync(folder, { recursive: true });

const failures = outcomes.filter(({ failed }) => failed > 0);
const sum = (of: (outcome: Outcome) => number) => outcomes.reduce((total, outcome) => total + of(outcome), 0);
const skipped = sum((outcome) => outcome.skipped);
console.log(`${files.length} files in ${((performance.now() - started) / 1000).toFixed(0)} s`);
if (reference)
	console.log(`programs of the reference Python: ${processorSecondsOf(reference).toFixed(1)} s of processors`);
if (failures.length > 0) console.log(`failed: ${failures.map(({ file }) => file).join(", ")}`);
console.log(
	`${sum(({ passed }) => passed)} passed, ${sum(({ failed }) => failed)} failed${skipped > 0 ? `, ${skipped} skipped` : ""}`,
);
process.exit(failures.length > 0 ? 1 : 0);
