/** A run under a real Slurm of two nodes whose first node is drained and lost: the spare node takes its ranks, the log has no gap. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { executable, mimo } from "../commands/mimo.ts";
import { canRunSlurm, LocalSlurm } from "./local-slurm.ts";
import { loggedSteps } from "./small-run.ts";

const steps = 40;

/** Processes of a run on one node of the job, which `folder` is the working folder of. */
function processesOn(node: number, folder: string): number[] {
	return readdirSync("/proc")
		.filter((name) => /^\d+$/.test(name))
		.map(Number)
		.filter((pid) => {
			try {
				const environment = readFileSync(`/proc/${pid}/environ`, "latin1").split("\0");
				const own = environment.includes(`MIMO_TEST_RUN=${folder}`) && environment.includes(`SLURM_NODEID=${node}`);
				return own && /^(?!srun\0).*--llm-dp/s.test(readFileSync(`/proc/${pid}/cmdline`, "latin1"));
			} catch {
				return false;
			}
		});
}

describe.skipIf(!canRunSlurm())("a job with a spare node", () => {
	let slurm: LocalSlurm;
	const folder = mkdtempSync(join(tmpdir(), "mimo-spare-"));
	beforeAll(async () => {
		slurm = await LocalSlurm.start();
	}, 120_000);
	afterAll(async () => {
		await slurm?.[Symbol.asyncDispose]();
		rmSync(folder, { recursive: true, force: true });
	}, 30_000);

	test("goes on there when its first node is lost", async () => {
		const text = join(folder, "text.txt");
		writeFileSync(text, readFileSync("examples/text/king-james.txt", "utf8").slice(0, 30_000));
		const flags = (log: string) =>
			`--preset nemotron-tiny --data-path ${text} --hidden-size 64 --seq-length 32 --llm-dp 2 --device cpu --threads 1 --micro-batch-size 1 --global-batch-size 2 --lr-warmup-iters 1 --log-interval 1 --train-iters ${steps} --log-json ${join(folder, log)}`;
		const saves = `--save ${join(folder, "saved")} --load ${join(folder, "saved")} --save-interval 2 --keep 1`;
		const script = join(folder, "job.sh");
		const line = `${flags("log.jsonl")} ${saves} --max-restarts 3 --spares 1 --non-persistent-save-interval 1`;
		writeFileSync(script, `#!/bin/bash\nsrun ${executable} train ${line}\n`);
		const output = join(folder, "out.txt");
		const said = () => (existsSync(output) ? readFileSync(output, "utf8") : "");
		const environment = { MIMO_SECRET: "of the test", MIMO_TEST_RUN: folder };
		const job = slurm.submit([resolve(script)], output, environment, ["--nodes=2", "--ntasks-per-node=2", "--no-kill"]);
		await slurm.until(() => / iteration +5\//.test(said()), 120);
		slurm.run(["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"]);
		// Agents first: they would start their ranks anew.
		const lost = processesOn(0, folder);
		expect(lost).toHaveLength(4);
		for (const pid of lost) process.kill(pid, "SIGKILL");
		await slurm.until(() => /Trained \d+ steps/.test(said()), 120);
		await slurm.ended(job);
		expect(said()).toMatch(/^mimo: Agent 2 leads the run from now on: /m);
		expect(said()).toMatch(/^mimo: Restart 1 of at most 3 within 60 minutes: host .* takes ranks 0 to 1; all ranks/m);
		expect(mimo(["train", ...flags("whole.jsonl").split(" ")]).exitCode).toBe(0);
		const values = (log: string) =>
			new Map(loggedSteps(join(folder, log)).map((step) => [step.iteration, [step["lm loss"], step.grad_norm]]));
		expect([...values("log.jsonl")]).toEqual([...values("whole.jsonl")]);
		expect(values("log.jsonl").size).toBe(steps);
	}, 300_000);
});
