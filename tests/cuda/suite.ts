/**
 * The tests that run on a device, on one GPU that all their processes share. A line a file with what passed, failed and was
 * skipped, then what failed; the exit code is 1 when anything did.
 *
 *   bun tests/cuda/suite.ts LIBRARY [--processes N] [--seconds N] [--lines N] [--device cpu] [PART OF A PATH ...]
 *
 * LIBRARY: libmimo_cuda.so; the CPU library has to be in build/lib. The program runs from source. --processes (8): how many
 * processes may hold the GPU at once, of which each takes some of its memory; files whose ranks are more run alone. --seconds:
 * no file starts later; those left are printed and count as failed, and 150 seconds later all have ended. --lines (40): of what
 * was printed before a test failed.
 * --device cpu: plays it on processors, LIBRARY being libmimo_cpu.so.
 */
import { chmodSync, closeSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { type Job, suiteJobs } from "./suite-files.ts";
import { type FileResult, failureText, fileResults } from "./suite-results.ts";

const root = resolve(import.meta.dir, "../..");
/** Seconds that one process of tests may take, and seconds after the last start by which all have ended. */
const [jobLimit, lastLimit] = [420, 150];

const { values: flags, positionals } = parseArgs({
	options: {
		processes: { type: "string", default: "8" },
		seconds: { type: "string", default: "3600" },
		lines: { type: "string", default: "40" },
		device: { type: "string", default: "cuda" },
	},
	allowPositionals: true,
});
const [library, ...parts] = positionals;
if (library === undefined) throw new Error("suite.ts needs the path of a library.");
const processes = Number(flags.processes);
const began = performance.now();
const elapsed = () => (performance.now() - began) / 1000;

const work = mkdtempSync(join(tmpdir(), "mimo-suite-"));
const program = join(work, "mimo");
writeFileSync(program, `#!/bin/sh\nexec "${process.execPath}" "${join(root, "src/main.ts")}" "$@"\n`);
chmodSync(program, 0o755);

const environment = {
	...process.env,
	...{ NO_COLOR: "1", MIMO_TEST_DEVICE: flags.device, MIMO_TEST_BACKEND: "shm", MIMO_TEST_EXECUTABLE: program },
	[`MIMO_${flags.device.toUpperCase()}_LIBRARY`]: resolve(library),
};

/** Runs the files of a job in one process of `bun test`; those that a crash has kept from running, in another. */
async function runJob({ files }: Job, number: string): Promise<FileResult[]> {
	const path = join(work, `${number}.log`);
	const log = openSync(path, "w");
	const started = performance.now();
	const child = Bun.spawn([process.execPath, "test", "--timeout=120000", ...files.map((file) => `./${file}`)], {
		cwd: root,
		env: environment,
		stdin: "ignore",
		stdout: log,
		stderr: log,
		detached: true,
	});
	let late = false;
	const limit = Math.min(jobLimit, Number(flags.seconds) + lastLimit - elapsed());
	const timer = setTimeout(() => {
		late = true;
		endGroup(child.pid);
	}, limit * 1000);
	await child.exited;
	clearTimeout(timer);
	endGroup(child.pid);
	closeSync(log);
	const ended = late ? `still running after ${limit.toFixed(0)} s` : (child.signalCode ?? child.exitCode ?? "");
	const { results, left } = fileResults(readFileSync(path, "utf8"), files, ended);
	const seconds = (performance.now() - started) / 1000;
	const timed = files.length === 1 ? results.map((result) => ({ ...result, seconds })) : results;
	for (const result of timed) report(result);
	return left.length === 0 ? timed : [...timed, ...(await runJob({ files: left, processes: 1 }, `${number}-rest`))];
}

/** Ends a process of tests and everything that it started. */
function endGroup(pid: number): void {
	try {
		process.kill(-pid, "SIGKILL");
	} catch {
		// No process of the group is left.
	}
}

function report({ file, passed, failed, skipped, seconds, problem }: FileResult): void {
	const counts = `${passed} passed, ${failed} failed, ${skipped} skipped`;
	console.log(
		`${problem === null ? "ok    " : "FAILED"} ${file}: ${counts}, ${seconds.toFixed(1)} s, at ${elapsed().toFixed(0)} s`,
	);
}

/** Runs the jobs in their order, as many at a time as the processes that they start allow. */
async function runAll(jobs: readonly Job[]): Promise<{ results: FileResult[]; left: Job[] }> {
	const waiting = [...jobs];
	const results: FileResult[] = [];
	const running = new Set<Promise<void>>();
	let busy = 0;
	let number = 0;
	while (waiting.length > 0 && elapsed() < Number(flags.seconds)) {
		const next = waiting.findIndex((job) => busy === 0 || busy + job.processes <= processes);
		// A job that needs the GPU for itself is not passed by those behind it.
		const fits = next === 0 || (next > 0 && waiting[0]!.processes < processes);
		if (fits) {
			const [job] = waiting.splice(next, 1);
			busy += job!.processes;
			const run: Promise<void> = runJob(job!, String(number++)).then((found) => {
				results.push(...found);
				busy -= job!.processes;
				running.delete(run);
			});
			running.add(run);
		} else await Promise.race(running);
	}
	await Promise.all(running);
	return { results, left: waiting };
}

const { results, left } = await runAll(suiteJobs(parts));
rmSync(work, { recursive: true });
const failures = results.filter(({ problem }) => problem !== null);
for (const failure of failures) {
	console.log(`\n== ${failure.file}: ${failure.problem}\n${failureText(failure, Number(flags.lines))}`);
}
const unstarted = left.flatMap(({ files }) => files);
if (unstarted.length > 0) console.log(`\nnot started within ${flags.seconds} s: ${unstarted.join(" ")}`);
const sum = (of: (result: FileResult) => number) => results.reduce((total, result) => total + of(result), 0);
if (failures.length > 0) console.log(`\nfailed: ${failures.map(({ file }) => file).join(" ")}`);
console.log(
	`${results.length} files in ${elapsed().toFixed(0)} s: ${sum(({ passed }) => passed)} passed, ${sum(({ failed }) => failed)} failed, ${sum(({ skipped }) => skipped)} skipped`,
);
process.exit(failures.length + unstarted.length > 0 ? 1 : 0);
