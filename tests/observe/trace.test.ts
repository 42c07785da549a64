/** Traces: the output of a tracer, the merging and summing of ranks, and the content of a real run's trace. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { countingLibrary } from "../../src/native/counting-library.ts";
import { Device } from "../../src/native/device.ts";
import type { NativeFunction } from "../../src/native/library.ts";
import { readTrace, summariseTrace } from "../../src/observe/trace/summary.ts";
import { exactTime, lanesOf, mergeTrace, partName, type TraceEvent, Tracer } from "../../src/observe/trace/tracer.ts";
import { groupOfOne } from "../../src/parallel/group.ts";
import { tracedGroup } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { complaintsOf } from "./trace-processor.ts";

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

test("parts, operations and collectives are summed by module, and the rest is the host's time", () => {
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

test("a GPU's time is divided into work, launch gaps and waits, where concurrent streams count once", () => {
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

test("a GPU's waits for collectives are named, without waits of no length", () => {
	// A GPU on which time passes when the test says so: an event's moment is when it was recorded.
	let now = 0;
	const moments = new Map<number, number>();
	const library = countingLibrary({ kind: "cuda", observe: () => {} });
	const events: Record<string, NativeFunction> = {
		mimo_event_create: (_device, out) => {
			moments.set(moments.size + 1, 0);
			(out as BigUint64Array)[0] = BigInt(moments.size);
			return 0;
		},
		mimo_event_record: (event) => {
			moments.set(event as number, now);
			return 0;
		},
		mimo_event_elapsed: (began, ended, out) => {
			(out as Float32Array)[0] = moments.get(ended as number)! - moments.get(began as number)!;
			return 0;
		},
	};
	const known = library.symbols;
	const symbols = new Proxy(events, { get: (own, name: string) => own[name] ?? known[name] });
	using device = Device.open({ ...library, symbols });
	const alone = groupOfOne("language.tp", 0);
	const group = tracedGroup({ ...alone, allReduce: () => ({ wait: () => (now += 3) }) }, device);
	using x = Tensor.empty(device, [4]);
	const tracer = new Tracer(device, 0, "rank 0: language, tp 0", 0);
	device.tracer = tracer;
	tracer.scope("layer.0");
	group.allReduce(x).wait();
	group.broadcast(x, 0).wait();
	group.allReduce(x).wait();
	device.tracer = null;
	const file = join(folder, "waits.json");
	tracer.write(partName(file, 0));
	mergeTrace(file, 1);
	const written = readTrace(file);
	const waits = written.filter(({ cat }) => cat === "waits");
	expect(waits.map(({ name, dur, args }) => [name, dur, args?.scope])).toEqual([
		["language.tp all_reduce", 3000, "layer.0"],
		["language.tp all_reduce", 3000, "layer.0"],
	]);
	expect(summariseTrace(written).modules[0]!.waits).toEqual([
		{ name: "language.tp all_reduce", calls: 2, milliseconds: 6, bytes: 0 },
	]);
});

test("collectives under way at once are counted once in the sums", () => {
	const send = (ts: number, dur: number) => span(0, "collectives", "send", ts, dur, { group: "bridge", bytes: 8 });
	const events = [title(0, "rank 0: language, tp 0"), span(0, "step", "compute", 0, 1000, { step: 1 })];
	const [language] = summariseTrace([...events, send(100, 400), send(0, 200), send(300, 100)]).modules;
	expect(language!.collectives).toEqual([{ name: "bridge send", calls: 3, milliseconds: 0.5, bytes: 24 }]);
	expect(language!.host).toBe(0.5);
});

test("the rules of Perfetto's trace processor: what overlaps, what nests, which thread", () => {
	const at = (ts: number, dur: number, tid = 1, pid = 0) => ({ name: `${ts}+${dur}`, ph: "X", pid, tid, ts, dur });
	expect(complaintsOf([at(0, 10), at(2, 3), at(5, 5), at(10, 1), at(10, 9, 2)])).toEqual([]);
	expect(complaintsOf([at(0, 10), at(2, 3)], { flat: true })).toHaveLength(1);
	expect(complaintsOf([at(0, 10), at(5, 6)])[0]).toContain("overlaps 0+10");
	// 1.001 × 1000 is a little less than 1001 as a double.
	expect(complaintsOf([at(0.001, 1), at(1.001, 1)])).toEqual([
		"1.001+1 (0.1, 1.001): overlaps 0.001+1 where a reader cuts off",
	]);
	expect(complaintsOf([at(0, 1, 0, 2), at(-1, 2)])).toEqual([
		"-1+2 (0.1, -1): begins before 0",
		"0+1 (2.0, 0): counts as of thread 2",
	]);
});

test("overlapping spans are in different lanes, except for a clock's jitter", () => {
	const spans = [0, 3, 5, 5, 11, 4].map((begin, i) => ({ begin, end: begin + [4, 8, 1, 0, 2, 3][i]! }));
	const lanes = lanesOf(spans);
	expect(lanes.map(({ lane }) => lane)).toEqual([0, 1, 2, 3, 0, 0]);
	const events = lanes.map(({ span: { begin }, lane, end }) => ({
		...{ name: "x", ph: "X", pid: 0, tid: 1 + lane, ts: exactTime(begin + 0.3) },
		dur: exactTime(end + 0.3) - exactTime(begin + 0.3),
	}));
	expect(complaintsOf(events, { flat: true })).toEqual([]);
	const jitter = lanesOf(
		[0, 9, 20].map((begin) => ({ begin, end: begin + 10 })),
		2,
	);
	expect(jitter.map(({ lane, end }) => [lane, end])).toEqual([
		[0, 9],
		[0, 19],
		[0, 30],
	]);
});

test("a file that is not a trace is named", () => {
	const file = join(folder, "none.json");
	writeFileSync(file, '{"traceEvents":[]}');
	expect(() => readTrace(file)).toThrow("is not a trace of mimo train");
	expect(() => readTrace(join(folder, "absent.json"))).toThrow("absent.json: it does not exist");
});

test("a run's trace: all ranks on one clock, layers, collectives in one order", () => {
	const file = join(folder, "run.json");
	const { exitCode, stdout, stderr } = mimo([
		...["train", "--preset", "nemotron-vlm-tiny", ...deviceFlags.split(" "), "--encoder-tp", "2", "--llm-dp", "2"],
		...["--llm-ep", "2", "--train-iters", "4", "--lr-warmup-iters", "0", "--log-interval", "1"],
		...["--profile-step-start", "2", "--profile-step-end", "3", "--profile-file", file],
	]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toContain(`Traced steps 2 to 3: ${file}.`);
	const events = readTrace(file);
	expect(complaintsOf(events, { flat: true })).toEqual([]);
	const threads = events.flatMap(({ name, pid, args }) =>
		name === "thread_name" && pid === 3 ? [String(args!.name)] : [],
	);
	expect(threads).toEqual(expect.arrayContaining(["step", "operations", "collectives"]));
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

test("a training that ends early writes the trace of its steps", () => {
	const file = join(folder, "short.json");
	const { exitCode, stdout } = mimo([
		...[
			"train",
			"--preset",
			"nemotron-vlm-tiny",
			...deviceFlags.split(" "),
			"--train-iters",
			"2",
			"--lr-warmup-iters",
			"0",
		],
		...["--profile-step-start", "2", "--profile-step-end", "9", "--profile-file", file],
	]);
	expect(exitCode).toBe(0);
	expect(stdout).toContain(`Traced steps 2 to 2: ${file}.`);
	expect(summariseTrace(readTrace(file)).steps).toBe(1);
}, 60_000);
