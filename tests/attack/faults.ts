/**
 * Lets runs meet faults drawn from a seed, two at a time, and prints a table and how many ended as they should.
 *
 *   bun tests/attack/faults.ts [--count 200] [--seed 1] [--only KIND] [--lanes 2]
 */
import { parseArgs } from "node:util";
import { canMount } from "../absent.ts";
import { drawFaults, type Fault, type FaultKind, mounting } from "./fault-plan.ts";
import { meetFault, type Outcome } from "./fault-run.ts";

/** Every fault with its outcome, in the order of their ends. */
export async function meetFaults(
	faults: readonly Fault[],
	lanes: number,
	hear: (outcome: Outcome) => void = () => {},
): Promise<Outcome[]> {
	const outcomes: Outcome[] = [];
	const queue = faults.values();
	const lane = async () => {
		for (const fault of queue) {
			const outcome = await meetFault(fault);
			outcomes.push(outcome);
			hear(outcome);
		}
	};
	await Promise.all(Array.from({ length: lanes }, lane));
	return outcomes;
}

/** Whether this machine can cause a kind of fault; prints a skip where it can mount no full disk and no small /dev/shm. */
export function possibleHere(): (kind: FaultKind) => boolean {
	const mounts = canMount();
	return (kind) => mounts || !mounting.includes(kind);
}

function line({ about, seconds, said, problems }: Outcome): string {
	const state = problems.length === 0 ? "ok" : "WRONG";
	const rest = problems.length === 0 ? said.slice(0, 110) : problems.join("; ");
	return `${state.padEnd(5)} ${about.padEnd(62)} ${seconds.toFixed(1).padStart(5)} s  ${rest}`;
}

function table(outcomes: readonly Outcome[]): string {
	const rows = [...Map.groupBy(outcomes, ({ kind }) => kind)].map(([kind, all]) => {
		const seconds = all.map((outcome) => outcome.seconds);
		const good = all.filter(({ problems }) => problems.length === 0).length;
		const mean = seconds.reduce((sum, value) => sum + value, 0) / seconds.length;
		return `${kind.padEnd(18)} ${`${good} of ${all.length}`.padStart(10)} ${mean.toFixed(1).padStart(8)} ${Math.max(
			...seconds,
		)
			.toFixed(1)
			.padStart(8)}`;
	});
	return [
		`${"fault".padEnd(18)} ${"as it should".padStart(10)} ${"mean s".padStart(6)} ${"most s".padStart(8)}`,
		...rows,
	].join("\n");
}

if (import.meta.main) {
	const { values } = parseArgs({
		options: {
			count: { type: "string", default: "200" },
			seed: { type: "string", default: "1" },
			only: { type: "string" },
			lanes: { type: "string", default: "2" },
		},
	});
	const began = performance.now();
	const possible = possibleHere();
	const drawn = drawFaults(Number(values.count), Number(values.seed), possible);
	const faults = drawn.filter(({ kind }) => values.only === undefined || kind === values.only);
	const outcomes = await meetFaults(faults, Number(values.lanes), (outcome) => console.log(line(outcome)));
	console.log(`\n${table(outcomes)}\n${((performance.now() - began) / 1000).toFixed(0)} s`);
	const good = outcomes.filter(({ problems }) => problems.length === 0).length;
	console.log(`${good} of ${outcomes.length}`);
	process.exit(good === outcomes.length ? 0 : 1);
}
