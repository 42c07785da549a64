/** examples/slurm/local.sbatch on a real Slurm: the same losses as a local run, resumed, cancelled, broken. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { executable, mimo } from "../commands/mimo.ts";
import { alive } from "../launch/launched.ts";
import { canRunSlurm, LocalSlurm } from "./local-slurm.ts";
import { loggedSteps } from "./small-run.ts";

const script = "examples/slurm/local.sbatch";
const steps = 10;

/** Ranks of one run: processes that read its log's folder in their command line. */
function ranksOf(folder: string): number[] {
	return readdirSync("/proc")
		.filter((name) => /^\d+$/.test(name))
		.map(Number)
		.filter((pid) => {
			try {
				const line = readFileSync(`/proc/${pid}/cmdline`, "utf8");
				return line.startsWith(executable) && line.includes(folder);
			} catch {
				return false;
			}
		});
}

const sharedMemory = () => readdirSync("/dev/shm").filter((name) => name.startsWith("mimo"));

describe.skipIf(!canRunSlurm())("a job", () => {
	let slurm: LocalSlurm;
	const folders: string[] = [];
	beforeAll(async () => {
		// The data of examples/vlm-tiny.yaml.
		expect(Bun.spawnSync(["bash", "examples/digits/prepare.sh"]).exitCode).toBe(0);
		slurm = await LocalSlurm.start();
	}, 120_000);
	afterAll(async () => {
		await slurm?.[Symbol.asyncDispose]();
		for (const folder of folders) rmSync(folder, { recursive: true, force: true });
	}, 30_000);

	function submit(count: number) {
		const folder = mkdtempSync(join(tmpdir(), "mimo-job-"));
		folders.push(folder);
		const output = join(folder, "out.txt");
		const job = slurm.submit([script], output, { MIMO: executable, RUN: folder, STEPS: String(count) });
		const said = () => (existsSync(output) ? readFileSync(output, "utf8") : "");
		const reached = (step: number) => slurm.until(() => new RegExp(` iteration +${step}/`).test(said()));
		return { folder, job, said, reached, log: join(folder, "log.jsonl") };
	}

	const losses = (log: string) => loggedSteps(log).map((step) => [step.iteration, step["lm loss"]]);

	let local: unknown[][];
	test("has the losses of a local run", async () => {
		const { folder, job, said, log } = submit(steps);
		expect([await slurm.ended(job), said()]).toEqual(["COMPLETED", expect.stringContaining(`Trained ${steps} steps`)]);
		const config = ["--config", "examples/vlm-tiny.yaml", "--device", "cpu", "--threads", "1"];
		const file = join(folder, "local.jsonl");
		const length = ["--train-iters", String(steps), "--lr-warmup-iters", "5"];
		expect(mimo(["train", ...config, ...length, "--log-json", file]).exitCode).toBe(0);
		local = losses(file);
		expect(local).toHaveLength(steps);
		expect(losses(log)).toEqual(local);
	}, 120_000);

	test("doctor looks at all nodes and tells of them once", () => {
		// Without srun's own word that a job waits for the one before it.
		const command = ["srun", "--quiet", "--nodes=2", "--ntasks-per-node=1", executable, "doctor"];
		const environment = { MIMO_SECRET: "of the test" };
		expect(slurm.run(command)).toContain(
			"the run has no secret: set MIMO_SECRET to the same random text for all ranks",
		);
		const table = slurm.run(command, environment);
		expect(table).toMatch(/^ok clocks +2 nodes within 500 ms$/m);
		expect(table).toMatch(/^ok network +1 pair of nodes over TCP: [\d.]+ Gbit\/s, at least/m);
		expect(table.match(/cpu library/g)).toHaveLength(1);
		expect(table).toEndWith("Training can run here.");
		const { nodes } = JSON.parse(slurm.run([...command, "--json"], environment));
		expect(nodes.map(({ rank }: { rank: number }) => rank)).toEqual([0, 1]);
		const wrong = slurm.run([...command, "--folder", "/proc/nowhere"], environment);
		expect(wrong).toMatch(/^! +disk +.*\/proc\/nowhere, which does not exist yet: a checkpoint may not fit$/m);
	}, 120_000);

	test("that gets USR1 saves, is put back into the queue, and goes on exactly", async () => {
		const { job, said, reached, log } = submit(steps);
		await reached(2);
		slurm.run(["scancel", "--signal=USR1", job]);
		await slurm.until(() => slurm.state(job) === "PENDING");
		expect(said()).toContain("Stopped by SIGUSR1 after step ");
		// Slurm waits two minutes before it starts a job again.
		slurm.run(["scontrol", "update", `JobId=${job}`, "StartTime=now"]);
		expect(await slurm.ended(job)).toBe("COMPLETED");
		expect(said()).toMatch(/going on after step \d+\./);
		expect(losses(log)).toEqual(local);
	}, 180_000);

	test("that is cancelled leaves no process, no shared memory and a whole log", async () => {
		const before = sharedMemory();
		const { folder, job, reached, log } = submit(5000);
		await reached(3);
		expect(ranksOf(folder)).toHaveLength(4);
		slurm.run(["scancel", job]);
		const cancelled = performance.now();
		await slurm.until(() => ranksOf(folder).length === 0, 20);
		expect(performance.now() - cancelled).toBeLessThan(15_000);
		expect(await slurm.ended(job)).toBe("CANCELLED");
		expect(sharedMemory()).toEqual(before);
		const text = readFileSync(log, "utf8");
		expect(text).toEndWith("\n");
		expect(JSON.parse(text.trim().split("\n").at(-1)!).time).toBeString();
	}, 120_000);

	test("whose rank is killed ends with the diagnosis in its output", async () => {
		const { folder, job, said, reached } = submit(5000);
		await reached(3);
		const ranks = ranksOf(folder);
		process.kill(ranks[1]!, "SIGKILL");
		const killed = performance.now();
		await slurm.until(() => ranks.every((pid) => !alive(pid)), 20);
		expect(performance.now() - killed).toBeLessThan(15_000);
		expect(await slurm.ended(job)).toBe("FAILED");
		expect(said()).toMatch(/mimo: rank \d \((radio_encoder|language), .*\) failed: .*\n( {2}rank \d .*\n){3}/);
	}, 120_000);
});
