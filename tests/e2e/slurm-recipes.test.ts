/** examples/slurm/train.sbatch on a real Slurm: every kind of recipe in a tiny form, from weights, in an image, put back. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { executable, mimo } from "../commands/mimo.ts";
import { canRunSlurm, LocalSlurm } from "./local-slurm.ts";
import { loggedSteps } from "./small-run.ts";

const steps = 4;

/** Flags that make a recipe's model small; its grids stay of the same kind, on two nodes of two tasks. */
const tiny = ["--device", "cpu", "--threads", "1", "--global-batch-size", "8", "--log-interval", "1"];
const picture = [
	...["--preset", "nemotron-vlm-tiny", "--vision-position-mode", "window"],
	...["--loss-roles", "assistant", "--data-end-id", "10", "--packing-buffer-size", "16", "--num-workers", "1"],
];
const forms = {
	"nodes-1": [...picture, "--encoder-tp", "2", "--encoder-dp", "2", "--llm-tp", "2", "--llm-dp", "2", "--llm-ep", "4"],
	"nodes-2": [...picture, "--encoder-dp", "4", "--llm-dp", "4", "--llm-ep", "4"],
	"nodes-2-disjoint": [...picture, "--encoder-dp", "2", "--llm-dp", "2", "--llm-ep", "2"],
	"text-1": ["--preset", "nemotron-tiny", "--llm-dp", "4", "--llm-ep", "4"],
	"gpu-1": picture,
	"gpu-1-lora": picture,
} as const;

describe.skipIf(!canRunSlurm())("a tiny form", () => {
	let slurm: LocalSlurm;
	const folder = mkdtempSync(join(tmpdir(), "mimo-recipe-"));
	beforeAll(async () => {
		expect(Bun.spawnSync(["bash", "examples/digits/prepare.sh"]).exitCode).toBe(0);
		slurm = await LocalSlurm.start();
	}, 120_000);
	afterAll(async () => {
		await slurm?.[Symbol.asyncDispose]();
		rmSync(folder, { recursive: true, force: true });
	}, 30_000);

	function submit(recipe: keyof typeof forms, name: string, environment: Record<string, string> = {}, count = steps) {
		const run = join(folder, name);
		const output = join(folder, `${name}.out`);
		const data = recipe === "text-1" ? "examples/text/king-james.txt" : "runs/digits";
		const length = ["--train-iters", String(count), "--lr-warmup-iters", "0"];
		const script = ["examples/slurm/train.sbatch", `examples/nemotron-nano/${recipe}.yaml`];
		const job = slurm.submit(
			[...script, ...tiny, ...forms[recipe], ...length],
			output,
			{ MIMO: executable, RUN: run, DATA: resolve(data), ...environment },
			recipe.startsWith("gpu-1") ? ["--ntasks-per-node=1", "--gpus-per-node=1"] : ["--nodes=2", "--ntasks-per-node=2"],
		);
		const said = () => (existsSync(output) ? readFileSync(output, "utf8") : "");
		return { run, job, said, log: join(run, "log.jsonl") };
	}

	for (const recipe of ["nodes-1", "nodes-2", "nodes-2-disjoint", "gpu-1", "gpu-1-lora"] as const) {
		test(`of ${recipe}.yaml trains and saves`, async () => {
			const { run, job, said, log } = submit(recipe, recipe);
			expect([await slurm.ended(job), said()]).toEqual([
				"COMPLETED",
				expect.stringMatching(new RegExp(`Training can run here\\.[\\s\\S]*Trained ${steps} steps`)),
			]);
			expect(loggedSteps(log)).toHaveLength(steps);
			expect(JSON.parse(readFileSync(join(run, "checkpoints/latest.json"), "utf8"))).toMatchObject({
				iteration: steps,
			});
		}, 120_000);
	}

	test("of text-1.yaml starts from a Hugging Face folder, also from one without a tokenizer", async () => {
		const weights = join(folder, "weights");
		const length = ["--train-iters", "30", "--data-path", "examples/text/king-james.txt", "--save-hf", weights];
		expect(mimo(["train", "--preset", "nemotron-tiny", "--device", "cpu", ...length]).exitCode).toBe(0);
		const fresh = submit("text-1", "fresh");
		expect([await slurm.ended(fresh.job), fresh.said()]).toEqual(["COMPLETED", expect.stringContaining("Trained")]);
		const { job, said, log } = submit("text-1", "loaded", { WEIGHTS: weights });
		expect([await slurm.ended(job), said()]).toEqual(["COMPLETED", expect.stringContaining("Trained")]);
		const first = (file: string) => loggedSteps(file)[0]!["lm loss"] as number;
		expect(first(log)).toBeLessThan(0.8 * first(fresh.log));
	}, 120_000);

	test("in an image, where there is no scontrol, is put back into the queue by its script", async () => {
		const bin = join(folder, "bin");
		mkdirSync(bin);
		// Stands in for pyxis: takes the image's flags, and leaves the tasks none of Slurm's commands.
		const srun = `#!/bin/bash
args=() image=
for a; do case $a in --container-image=*) image=$a ;; --container-*) ;; *) args+=("$a") ;; esac; done
[ -n "$image" ] || exit 9
PATH=${bin}/none exec ${Bun.which("srun")} "\${args[@]}"
`;
		writeFileSync(join(bin, "srun"), srun);
		chmodSync(join(bin, "srun"), 0o755);
		const environment = { IMAGE: "/images/mimo.sqsh", PATH: `${bin}:${process.env.PATH}` };
		const { job, said, log } = submit("nodes-2-disjoint", "image", environment, 40);
		await slurm.until(() => / iteration +2\//.test(said()));
		slurm.run(["scancel", "--signal=USR1", job]);
		await slurm.until(() => slurm.state(job) === "PENDING");
		expect(said()).toContain("Stopped by SIGUSR1 after step ");
		slurm.run(["scontrol", "update", `JobId=${job}`, "StartTime=now"]);
		expect([await slurm.ended(job), said()]).toEqual(["COMPLETED", expect.stringMatching(/going on after step \d+\./)]);
		expect(loggedSteps(log)).toHaveLength(40);
	}, 180_000);
});

test("every kind of recipe has a tiny form", () => {
	const kinds = [...new Bun.Glob("*.yaml").scanSync("examples/nemotron-nano")].map((name) => name.replace(".yaml", ""));
	// Eight nodes hold what two hold, more often.
	expect(kinds.filter((name) => !name.startsWith("nodes-8")).sort()).toEqual(Object.keys(forms).sort());
});
