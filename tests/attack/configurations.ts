/**
 * Draws configurations of tiny models from a seed, holds runs of each to one another, and prints what did not hold with
 * the commands that show it.
 *
 *   bun tests/attack/configurations.ts [--count 100] [--seed 1] [--first N] [--only RELATION] [--with KEY]
 *     [--minutes N] [--features]
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { Case, Refused, Wrong } from "./configurations/case.ts";
import { trainable } from "./configurations/data/reading.ts";
import { writeData } from "./configurations/data/sets.ts";
import { Draw, type Flags } from "./configurations/draw.ts";
import { refusal } from "./configurations/layout/grids.ts";
import { drawModel, usual } from "./configurations/model/model.ts";
import { relations } from "./configurations/relations/all.ts";
import type { Relation } from "./configurations/relations/relation.ts";

export type State = "ok" | "tie" | "refused" | "WRONG";

export interface Outcome {
	readonly number: number;
	readonly relation: string;
	readonly flags: Flags;
	readonly state: State;
	/** What did not hold, or why the configuration was refused. */
	readonly said: string;
	readonly commands: readonly string[];
	readonly seconds: number;
}

export interface Wanted {
	/** Beginning of the name of a relation; absent: all. */
	readonly only?: string | undefined;
	/** Key that configurations give; absent: any. */
	readonly having?: string | undefined;
	/** Number of the first one. */
	readonly first?: number;
}

/** Configuration `number` of a seed, drawn until the checks of configurations allow it. */
function meet(seed: number, number: number, { only, having }: Wanted, data: string): Outcome {
	const began = performance.now();
	const draw = new Draw(seed * 1_000_003 + number);
	const wanted: readonly Relation[] = relations.filter(({ name }) => only === undefined || name.startsWith(only));
	for (;;) {
		const relation = draw.one(wanted);
		const emphasis = { ...usual, ...relation.emphasis };
		const flags = { ...trainable(draw, drawModel(draw, emphasis), emphasis, data), device: "cpu", threads: "1" };
		if (having !== undefined && !(having in flags)) continue;
		if (relation.suits?.(flags) === false || refusal(flags) !== null) continue;
		using place = new Case();
		let [state, said]: [State, string] = ["ok", ""];
		try {
			state = relation.hold(draw, flags, place);
		} catch (error) {
			if (!(error instanceof Refused || error instanceof Wrong)) throw error;
			[state, said] = [error instanceof Wrong ? "WRONG" : "refused", error.message];
		}
		const seconds = (performance.now() - began) / 1000;
		return { number, relation: relation.name, flags, state, said, commands: place.commands, seconds };
	}
}

export function* meetConfigurations(count: number, seed: number, wanted: Wanted = {}): Generator<Outcome> {
	const { first = 0 } = wanted;
	const data = mkdtempSync(join(tmpdir(), "mimo-configurations-"));
	try {
		writeData(data);
		for (let number = first; number < first + count; number++) yield meet(seed, number, wanted, data);
	} finally {
		rmSync(data, { recursive: true, force: true });
	}
}

function line({ number, relation, flags, state, said, seconds }: Outcome): string {
	const about = `${state.padEnd(7)} ${String(number).padStart(4)} ${relation.padEnd(24)} ${seconds.toFixed(1).padStart(5)} s ${flags["hybrid-layer-pattern"]}`;
	return said === "" ? about : `${about}\n        ${said.split("\n").join("\n        ")}`;
}

/** How often options were in configurations that held, by key, and by value where values are words. */
function features(outcomes: readonly Outcome[]): string {
	const counts = new Map<string, number>();
	for (const { flags } of outcomes) {
		for (const [key, value] of Object.entries(flags)) {
			const name = /^[a-z]/.test(value) && !value.includes("/") && value !== "true" ? `${key} ${value}` : key;
			counts.set(name, (counts.get(name) ?? 0) + 1);
		}
	}
	return [...counts]
		.sort(([a], [b]) => a.localeCompare(b))
		.map(([name, count]) => `${name}: ${count}`)
		.join("\n");
}

if (import.meta.main) {
	const { values } = parseArgs({
		options: {
			count: { type: "string", default: "100" },
			seed: { type: "string", default: "1" },
			first: { type: "string", default: "0" },
			only: { type: "string" },
			with: { type: "string" },
			minutes: { type: "string", default: "600" },
			features: { type: "boolean", default: false },
		},
	});
	const end = performance.now() + Number(values.minutes) * 60_000;
	const outcomes: Outcome[] = [];
	const wanted = { only: values.only, having: values.with, first: Number(values.first) };
	for (const outcome of meetConfigurations(Number(values.count), Number(values.seed), wanted)) {
		outcomes.push(outcome);
		console.log(line(outcome));
		if (outcome.state === "WRONG") console.log(outcome.commands.map((command) => `        ${command}`).join("\n"));
		if (performance.now() > end) break;
	}
	const states = Map.groupBy(outcomes, ({ state }) => state);
	if (values.features) console.log(features(outcomes.filter(({ state }) => state !== "refused")));
	console.log([...states].map(([state, all]) => `${all.length} ${state}`).join(", "));
	process.exit(states.has("WRONG") ? 1 : 0);
}
