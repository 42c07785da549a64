/** Metrics of a run in Prometheus' text format: what they say, and a scrape of a running `mimo train`. */
import { expect, test } from "bun:test";
import { RunMetrics, type StepSample } from "../../src/observe/metrics/exposition.ts";
import { MetricsServer } from "../../src/observe/metrics/server.ts";
import { executable } from "../commands/mimo.ts";
import { loggedSteps, SmallRun } from "../e2e/small-run.ts";

interface Family {
	readonly type: string;
	/** Values by labels as they stand. */
	readonly values: Map<string, number>;
}

const name = "[a-zA-Z_:][a-zA-Z0-9_:]*";
const label = `[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\\\\n]|\\\\[\\\\"n])*"`;
const sample = new RegExp(`^(${name})(\\{${label}(?:,${label})*\\})? (NaN|[+-]Inf|-?\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?)$`);

/** Reads the format strictly: HELP and TYPE before the samples of a family, families together, no sample twice. */
function parse(text: string): Map<string, Family> {
	expect(text).toEndWith("\n");
	const families = new Map<string, Family>();
	const helped = new Set<string>();
	let current = "";
	for (const line of text.slice(0, -1).split("\n")) {
		const [, help] = new RegExp(`^# HELP (${name}) [^\\n]+$`).exec(line) ?? [];
		const [, typed, type] = new RegExp(`^# TYPE (${name}) (counter|gauge)$`).exec(line) ?? [];
		if (help !== undefined) {
			expect(helped).not.toContain(help);
			helped.add(help);
		} else if (typed !== undefined) {
			expect(helped).toContain(typed);
			expect(families.has(typed)).toBeFalse();
			families.set(typed, { type: type!, values: new Map() });
			current = typed;
		} else {
			const [, of, labels = "", value] = sample.exec(line) ?? [];
			expect({ line, of }).toEqual({ line, of: current });
			const { values, type } = families.get(current)!;
			expect(values.has(labels)).toBeFalse();
			const number = value === "+Inf" ? Infinity : value === "-Inf" ? -Infinity : Number(value);
			if (type === "counter") expect(number).toBeGreaterThanOrEqual(0);
			values.set(labels, number);
		}
	}
	for (const [family, { type, values }] of families) {
		expect(values.size).toBeGreaterThan(0);
		expect(type === "counter").toBe(family.endsWith("_total"));
	}
	return families;
}

const step = (iteration: number, more: Partial<StepSample> = {}): StepSample => ({
	iteration,
	...{ consumedSamples: 8 * iteration, tokens: 64, seconds: 0.5, learningRate: 1e-4 },
	...{ losses: { "lm loss": 2, 'odd "loss"\\': Number.NaN }, gradNorm: 1.5, skipped: false, memory: null },
	...more,
});

test("counters sum, gauges are the last, and only steps that bring the training forward are productive", () => {
	const metrics = new RunMetrics({ version: "1.2.3", worldSize: 4, trainIterations: 10 }, 100);
	const value = (family: string, labels = "") => parse(metrics.text(104)).get(`mimo_${family}`)?.values.get(labels);
	expect(value("steps_total")).toBe(0);
	expect(value("loss", '{loss="lm loss"}')).toBeUndefined();
	expect(value("goodput_ratio")).toBe(0);
	const seconds = { compute: 0.25, bridge: 0, wait: 0.125, gradients: 0, optimizer: 0, data: 0, other: 0.125 };
	const module = { name: "language", ranks: 2, seconds, flops: 4e12, idle: 0.25, slowest: { rank: 3, busy: 0.4 } };
	const modules = [module];
	for (const sample of [
		step(5, { modules }),
		step(6, { modules }),
		step(5),
		step(6),
		step(7, { skipped: true, gradNorm: null }),
	]) {
		metrics.take({ kind: "step", sample }, 103);
	}
	metrics.take({ kind: "save" }, 103);
	metrics.take({ kind: "start", restarts: 2 }, 103);
	metrics.take({ kind: "evaluation", report: { split: "validation", losses: { "lm loss": 3 } } }, 103);
	expect(value("build_info", '{version="1.2.3"}')).toBe(1);
	expect([value("steps_total"), value("step"), value("skipped_steps_total")]).toEqual([5, 7, 1]);
	expect([value("tokens_total"), value("tokens_per_second")]).toEqual([320, 128]);
	expect([value("productive_seconds_total"), value("uptime_seconds_total"), value("goodput_ratio")]).toEqual([
		1, 4, 0.25,
	]);
	expect([value("saves_total"), value("restarts_total"), value("last_step_timestamp_seconds")]).toEqual([1, 2, 103]);
	expect(value("module_seconds_total", '{module="language",part="compute"}')).toBe(0.5);
	expect(value("gradient_norm")).toBeUndefined();
	expect(value("evaluation_loss", '{split="validation",loss="lm loss"}')).toBe(3);
	expect(value("loss", '{loss="odd \\"loss\\"\\\\"}')).toBeNaN();
	metrics.take({ kind: "step", sample: step(8, { modules }) }, 104);
	expect(value("module_flops_per_second", '{module="language"}')).toBe(4e12);
	expect(value("module_slowest_rank", '{module="language"}')).toBe(3);
});

test("a port that is taken is an error with a sentence, after the time in which an ending run leaves it", async () => {
	using other = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response() });
	const facts = { version: "1", worldSize: 1, trainIterations: 1 };
	await expect(MetricsServer.open("127.0.0.1", other.port!, facts)).rejects.toThrow(
		`--metrics-port ${other.port} cannot be opened on 127.0.0.1 (metrics-address): another program has the port.`,
	);
}, 20_000);

test("a running training is scraped, on the loopback interface alone", async () => {
	using run = new SmallRun();
	const flags = `--preset nemotron-tiny --hidden-size 64 --seq-length 64 --device cpu --train-iters 100000 --log-json log.jsonl --metrics-port 0`;
	const child = Bun.spawn([executable, "train", ...flags.split(" "), "--data-path", "text.txt"], {
		cwd: run.folder,
		stdout: "pipe",
		stderr: "inherit",
	});
	try {
		let said = "";
		let url: string | undefined;
		// The stream is not ended, which would end the run.
		const reader = child.stdout.getReader();
		while (url === undefined) {
			const { value, done } = await reader.read();
			if (done) throw new Error(`The run has ended: ${said}`);
			said += new TextDecoder().decode(value);
			[, url] = /Metrics: (http:\/\/127\.0\.0\.1:\d+\/metrics)\./.exec(said) ?? [];
		}
		let families = new Map<string, Family>();
		for (const end = Date.now() + 60_000; (families.get("mimo_step")?.values.get("") ?? 0) < 3; ) {
			expect(Date.now()).toBeLessThan(end);
			await Bun.sleep(20);
			const response = await fetch(url);
			expect(response.headers.get("content-type")).toBe("text/plain; version=0.0.4; charset=utf-8");
			families = parse(await response.text());
		}
		const value = (family: string, labels = "") => families.get(`mimo_${family}`)!.values.get(labels)!;
		const at = value("step");
		const logged = loggedSteps(run.path("log.jsonl")).find(({ iteration }) => iteration === at)!;
		expect(value("loss", '{loss="lm loss"}')).toBe(logged["lm loss"] as number);
		expect(value("gradient_norm")).toBe(logged.grad_norm as number);
		expect(value("steps_total")).toBe(at);
		expect(value("train_steps")).toBe(100_000);
		expect(value("module_seconds_total", '{module="language",part="compute"}')).toBeGreaterThan(0);
		expect(value("goodput_ratio")).toBeGreaterThan(0);
		expect((await fetch(url.replace("/metrics", "/"))).status).toBe(404);
	} finally {
		child.kill("SIGKILL");
		await child.exited;
	}
}, 90_000);
