/** Traces: the output of a tracer, the merging and summing of ranks, and the content of a real run's trace. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mergeTrace, partName, type TraceEvent } from "../../src/observe/trace.ts";
import { readTrace, summariseTrace } from "../../src/observe/trace-summary.ts";
import { mimo } from "../commands/mimo.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-trace-"));
afterAll(() => rmSync(folder, { recursive: true }));

const title = (pid: number, name: string): TraceEvent => ({
	name: "process_name",
	ph: "M",
	pid,
	tid: 0,
	args: { name },
});
const span = (pid: number, cat: string, name: string, ts: number, dur: number, args: TraceEvent["args"] = {}) =>
	({ name, ph: "X", pid, tid: 0, ts, dur, cat, args }) as TraceEvent;

test("parts, operations and collectives are summed up by module, the host's own time is what is left", () => {
	const file = join(folder, "two.json");
	for (const rank of [0, 1]) {
		const events = [
			title(rank, `rank ${rank}: language, tp ${rank}`),
			span(rank, "step", "compute", 1000, 10_000, { step: 7 }),
			span(rank, "step", "optimizer", 11_000, 2000, { step: 7 }),
			span(rank, "operations", "gemm", 1000, 4000 + 2000 * rank, { scope: "layer.0" }),
			span(rank, "operations", "adamw", 11_000, 1500, { scope: "" }),
			span(rank, "collectives", "all_reduce", 8000, 1000, { group: "language.tp", sequence: 0, bytes: 4096 }),
			{ name: "memory", ph: "C", pid: rank, tid: 0, ts: 1000, args: { allocated: 100 + rank } },
		];
		writeFileSync(partName(file, rank), events.map((event) => `${JSON.stringify(event)}\n`).join(""));
	}
	mergeTrace(file, 2);
	expect(existsSync(partName(file, 0))).toBe(false);
	const { steps, ranks, milliseconds, modules } = summariseTrace(readTrace(file));
	expect([steps, ranks, milliseconds]).toEqual([1, 2, 12]);
	const [language] = modules;
	expect(language).toMatchObject({ name: "language", ranks: 2, peakBytes: 101, host: 4 });
	expect(language!.parts.map(({ name, milliseconds: ms }) => [name, ms])).toEqual([
		["compute", 10],
		["optimizer", 2],
	]);
	expect(language!.operations[0]).toEqual({ name: "gemm", calls: 1, milliseconds: 5, bytes: 0 });
	expect(language!.collectives[0]).toMatchObject({ name: "language.tp all_reduce", bytes: 4096 });
});

test("a GPU's time is what it worked, gaps between launches and waits, streams side by side counted once", () => {
	const operation = (rank: number, ts: number, dur: number) => span(rank, "operations", "gemm", ts, dur);
	const events = [
		title(0, "rank 0: language, tp 0"),
		span(0, "step", "compute", 0, 2000, { step: 1 }),
		span(0, "queueing", "gemm", 5, 1),
		...[operation(0, 10, 100), operation(0, 150, 50), operation(0, 160, 60), operation(0, 720, 80)],
	];
	const [language] = summariseTrace(events).modules;
	expect(language!.gpu).toEqual({ busy: 0.25, launchGaps: 0.04, waits: 0.5 });
	// Another rank's operations fill no gaps of this one.
	const other = [title(1, "rank 1: language, tp 1"), span(1, "queueing", "gemm", 5, 1), operation(1, 110, 40)];
	expect(summariseTrace([...events, ...other]).modules[0]!.gpu).toEqual({ busy: 0.145, launchGaps: 0.02, waits: 0.25 });
	expect(language!.operations).toMatchObject([{ name: "gemm", calls: 4 }]);
});

test("what is no trace is named", () => {
	const file = join(folder, "none.json");
	writeFileSync(file, '{"traceEvents":[]}');
	expect(() => readTrace(file)).toThrow("is no trace of mimo train");
	expect(() => readTrace(join(folder, "absent.json"))).toThrow("cannot be read: ENOENT");
});

test("a run's trace: all ranks on one clock, layers, collectives in one order", () => {
	const file = join(folder, "run.json");
	const { exitCode, stdout, stderr } = mimo([
		...["train", "--preset", "nemotron-vlm-tiny", "--device", "cpu", "--encoder-tp", "2", "--llm-dp", "2"],
		...["--llm-ep", "2", "--train-iters", "4", "--lr-warmup-iters", "0", "--log-interval", "1"],
		...["--profile-step-start", "2", "--profile-step-end", "3", "--profile-file", file],
	]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toContain(`Traced steps 2 to 3: ${file}.`);
	const events = readTrace(file);
	const summary = summariseTrace(events);
	expect([summary.steps, summary.ranks, summary.modules.map(({ name }) => name)]).toEqual([
		2,
		4,
		["radio_encoder", "language"],
	]);
	const steps = (rank: number) =>
		events.filter(({ pid, cat, args }) => pid === rank && cat === "step" && args?.step === 2);
	// The same step, on one clock: it overlaps on all ranks.
	const begins = [0, 1, 2, 3].map((rank) => Math.min(...steps(rank).map(({ ts }) => ts!)));
	const ends = [0, 1, 2, 3].map((rank) => Math.max(...steps(rank).map(({ ts, dur }) => ts! + dur!)));
	expect(Math.max(...begins)).toBeLessThan(Math.min(...ends));
	// Members of a group call the same collectives in the same order.
	const calls = (rank: number, group: string) =>
		events
			.filter(({ pid, cat, args }) => pid === rank && cat === "collectives" && args?.group === group)
			.map(({ name, args }) => `${name} ${args!.sequence}`);
	expect(calls(2, "language.tp_ep").length).toBeGreaterThan(10);
	expect(calls(3, "language.tp_ep")).toEqual(calls(2, "language.tp_ep"));
	const scopes = new Set(events.filter(({ pid }) => pid === 2).map(({ args }) => args?.scope));
	for (const scope of ["layer.0", "layer.5 backward", "output"]) expect(scopes).toContain(scope);
	expect(events.some(({ ph, args }) => ph === "C" && Number(args?.allocated) > 0)).toBe(true);
}, 60_000);
