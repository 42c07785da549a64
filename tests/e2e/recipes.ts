/**
 * Recipes: configurations of examples/ whose header holds a `mimo plan` command and what it prints.
 *
 *   bun tests/e2e/recipes.ts     writes the numbers of all headers anew
 */
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { machineOf, ownFlags } from "../../src/commands/plan.ts";
import { planText } from "../../src/commands/plan-text.ts";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { planRun } from "../../src/plan/run-plan.ts";

const root = join(import.meta.dir, "../..");

export interface Recipe {
	/** Path from the root, as the commands of its header have it. */
	readonly file: string;
	readonly text: string;
	/** Arguments of the `mimo plan` line. */
	readonly plan: readonly string[];
	/** Arguments of the `sbatch` line. */
	readonly sbatch: readonly string[];
}

export const recipeFiles: readonly string[] = ["nemotron-nano", "slurm"].flatMap((folder) =>
	[...new Bun.Glob("*.yaml").scanSync(join(root, "examples", folder))]
		.sort()
		.map((name) => `examples/${folder}/${name}`),
);

export function readRecipe(file: string): Recipe {
	const text = readFileSync(join(root, file), "utf8");
	const command = (name: string) => {
		const found = new RegExp(`^# {3}(?:\\S+=\\S+ )*${name} (.*)$`, "m").exec(text);
		if (found === null) throw new Error(`${file} has no line with ${name} in its header.`);
		return found[1]!.split(/\s+/);
	};
	return { file, text, plan: command("mimo plan"), sbatch: command("sbatch") };
}

/** Lines of the plan that a header has: ranks and batch, memory of a rank, the step's time and rate, and what bounds it. */
export async function planLines(recipe: Recipe): Promise<string[]> {
	const resolved = resolveConfiguration(recipe.plan, ownFlags, { trains: false });
	const machine = await machineOf(resolved);
	const lines = planText(await planRun(resolved.configuration, machine), machine).split("\n");
	const memory = lines.indexOf("# Memory of a rank") + 1;
	return [lines[0]!, ...lines.slice(memory, lines.indexOf("", memory)), ...lines.slice(-3)];
}

/** The recipe's text with these lines after its plan command. */
export function withPlan({ file, text }: Recipe, lines: readonly string[]): string {
	const [, head, body] = /^((?:#.*\n)*?# {3}mimo plan .*\n#\n)(?:#.*\n)*(\n[\s\S]*)$/.exec(text) ?? [];
	if (head === undefined) throw new Error(`${file} does not begin with a comment that has a plan command.`);
	return `${head}${lines.map((line) => `#   ${line}\n`).join("")}${body}`;
}

if (import.meta.main) {
	process.chdir(root);
	for (const recipe of recipeFiles.map(readRecipe)) {
		writeFileSync(recipe.file, withPlan(recipe, await planLines(recipe)));
	}
}
