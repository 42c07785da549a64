/**
 * Lets runs meet faults drawn from a seed, two at a time, and prints a table and how many ended as they should.
 *
 *   bun tests/attack/faults.ts [--count 200] [--seed 1] [--only KIND] [--lanes 2]
 */
import { canMount } from "../absent.ts";
import { drawFaults, type Fault, type FaultKind, mounting } from "./fault-plan.ts";
import { meetFault, type Outcome } from "./fault-run.ts";
import { attackFlags, tableOf } from "./summary.ts";

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

if (import.meta.main) {
	const values = attackFlags({ count: "200", seed: "1", lanes: "2" });
	const began = performance.now();
	const possible = possibleHere();
	const drawn = drawFaults(Number(values.count), Number(values.seed), possible);
	const faults = drawn.filter(({ kind }) => values.only === undefined || kind === values.only);
	const outcomes = await meetFaults(faults, Number(values.lanes), (outcome) => console.log(line(outcome)));
	const goodOf = (some: readonly Outcome[]) => some.filter(({ problems }) => problems.length === 0).length;
	const table = tableOf(outcomes, ({ kind }) => kind, { "as it should": goodOf });
	console.log(`\n${table}\n${((performance.now() - began) / 1000).toFixed(0)} s`);
	const good = goodOf(outcomes);
	console.log(`${good} of ${outcomes.length}`);
	process.exit(good === outcomes.length ? 0 : 1);
}
