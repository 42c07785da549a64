/** Recipes: their numbers are those of `mimo plan`, and train.sbatch starts what they say. */
import { afterAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { topologyOf } from "../../src/parallel/topology.ts";
import { planLines, type Recipe, readRecipe, recipeFiles, withPlan } from "./recipes.ts";

const recipes = recipeFiles.map(readRecipe);
/** The recipes that people start from; with MIMO_TEST_FULL also the others, which are for many nodes. */
const planned = process.env.MIMO_TEST_FULL ? recipes : recipes.filter(({ file }) => file.includes("nemotron-nano"));

test.each(planned.map((recipe) => [recipe.file, recipe] as const))(
	"%s has the numbers of its plan (bun tests/e2e/recipes.ts writes them)",
	async (_, recipe) => {
		expect(recipe.text).toBe(withPlan(recipe, await planLines(recipe)));
	},
	60_000,
);

test.each(recipes.map(({ file, text }) => [file, text] as const))("%s fits into the memory of its GPUs", (_, text) => {
	const shares = [...text.matchAll(/^# {3}\S+ .* ([\d.]+) %$/gm)].map(([, share]) => Number(share));
	expect(shares.length).toBeGreaterThan(0);
	expect(Math.max(...shares)).toBeLessThan(100);
});

/** Tasks that the header's sbatch line asks for, with what train.sbatch asks for itself. */
function tasks({ sbatch }: Recipe): number {
	const script = readFileSync("examples/slurm/train.sbatch", "utf8");
	const asked = (name: string) => Number(new RegExp(`--${name}=(\\d+)`).exec(`${sbatch.join(" ")}\n${script}`)![1]);
	return asked("nodes") * asked("ntasks-per-node");
}

describe("train.sbatch", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-recipes-"));
	afterAll(() => rmSync(folder, { recursive: true }));
	mkdirSync(join(folder, "bin"));
	const command = (name: string, body: string) => {
		writeFileSync(join(folder, "bin", name), `#!/bin/bash\n${body}\n`);
		chmodSync(join(folder, "bin", name), 0o755);
	};
	// Stand in for Slurm: srun notes its arguments, one a line, and ends as it is told to.
	command(
		"srun",
		`printf '%s\\n' "$@" "MIMO_SECRET=$MIMO_SECRET" >"$CALLS.$(ls "$CALLS".* 2>/dev/null | wc -l)"; for a; do [ "$a" = train ] && exit "$STATUS"; done; exit "\${DOCTOR:-0}"`,
	);
	command("scontrol", `echo "$@" >>"$CALLS-scontrol"`);

	let runs = 0;
	function run(args: readonly string[], environment: Record<string, string>) {
		const calls = join(folder, `calls-${runs++}`);
		const { exitCode, stderr } = Bun.spawnSync(["bash", "examples/slurm/train.sbatch", ...args], {
			env: {
				PATH: `${folder}/bin:${process.env.PATH}`,
				...{ CALLS: calls, STATUS: "0", SLURM_JOB_ID: "7", SLURM_NNODES: "2", SLURM_CPUS_PER_TASK: "16" },
				...environment,
			},
			stderr: "pipe",
		});
		const read = (file: string) => (Bun.file(file).size > 0 ? readFileSync(file, "utf8").trim().split("\n") : []);
		const [first, second] = [read(`${calls}.0`), read(`${calls}.1`)];
		return { exitCode, stderr: stderr.toString(), first, second, scontrol: read(`${calls}-scontrol`) };
	}
	const given = { DATA: join(folder, "data"), RUN: join(folder, "run") };
	const parts = { WEIGHTS: "/weights/nano", TOWER: "/weights/radio", TOKENIZER: "/weights/tokenizer.json" };

	test.each(recipes.map((recipe) => [recipe.file, recipe] as const))("starts %s on its nodes", (_, recipe) => {
		expect(recipe.sbatch.slice(-2)).toEqual(["examples/slurm/train.sbatch", recipe.file]);
		const { exitCode, stderr, second } = run([recipe.file, "--device", "cuda"], given);
		expect([exitCode, stderr]).toEqual([0, ""]);
		const train = second.slice(second.indexOf("train") + 1, -1);
		const { configuration: c } = resolveConfiguration(train);
		expect(topologyOf(c).worldSize).toBe(tasks(recipe));
		expect(c.dataPath).toBe(given.DATA);
		expect([c.save, c.load, c.keep, c.exitSignalHandler]).toEqual([
			join(given.RUN, "checkpoints"),
			join(given.RUN, "checkpoints"),
			3,
			true,
		]);
	});

	const recipe = "examples/nemotron-nano/nodes-2-disjoint.yaml";

	test("lets doctor look at every node first, hands on the processors, and keeps the secret off the command line", () => {
		const { first, second } = run([recipe], given);
		expect(first.join(" ")).toContain("--ntasks=2 --ntasks-per-node=1 mimo doctor --folder");
		for (const call of [first, second]) {
			expect(call.slice(0, 2)).toEqual(["--kill-on-bad-exit=0", "--cpus-per-task=16"]);
			expect(call.at(-1)!.length).toBeGreaterThan("MIMO_SECRET=".length + 40);
		}
		expect(first.at(-1)).toBe(second.at(-1)!);
		const secret = first.at(-1)!.slice("MIMO_SECRET=".length);
		expect([...first, ...second].filter((word) => word.includes(secret))).toHaveLength(2);
	});

	test("starts from the weights and the tokenizer that are named", () => {
		const { second } = run([recipe], { ...given, ...parts });
		expect(second.join(" ")).toContain(
			`--load-hf ${parts.WEIGHTS} --load-vision ${parts.TOWER} --tokenizer ${parts.TOKENIZER} --save`,
		);
		expect(run([recipe], given).second.join(" ")).toContain(`--data-path ${given.DATA} --save`);
	});

	test("does not train where doctor finds a node that cannot", () => {
		const { exitCode, second } = run([recipe], { ...given, DOCTOR: "1" });
		expect([exitCode, second]).toEqual([1, []]);
	});

	test("runs the tasks in an image that sees data, weights and run, and puts the job back itself", () => {
		const image = { ...given, ...parts, IMAGE: "/images/mimo.sqsh", MOUNTS: "/scratch:/scratch" };
		const { first, second, scontrol, exitCode } = run([recipe], { ...image, STATUS: "75" });
		const mounts = ["/scratch", process.cwd(), given.RUN, given.DATA, ...Object.values(parts)];
		for (const call of [first, second]) {
			expect(call).toContain("--container-image=/images/mimo.sqsh");
			expect(call).toContain(`--container-mounts=${mounts.map((path) => `${path}:${path}`).join(",")}`);
		}
		expect([exitCode, scontrol]).toEqual([75, ["requeue 7"]]);
		expect(run([recipe], { ...image, STATUS: "1" })).toMatchObject({ exitCode: 1, scontrol: [] });
		// Without an image rank 0 does so.
		expect(run([recipe], { ...given, STATUS: "75" })).toMatchObject({ exitCode: 75, scontrol: [] });
	});

	test("without a recipe, data or a folder of the run says so", () => {
		const { DATA, RUN } = given;
		for (const [args, environment, word] of [
			[[], given, "recipe"],
			[[recipe], { RUN }, "DATA"],
			[[recipe], { DATA }, "RUN"],
		] as const) {
			const { exitCode, stderr, first } = run(args, environment);
			expect([exitCode, first]).toEqual([1, []]);
			expect(stderr.trim().split("\n")).toEqual([expect.stringContaining(word)]);
		}
	});
});
