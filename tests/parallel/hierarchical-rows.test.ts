/** Experts' rows that go to a node once, among four processes played as nodes; hierarchical-rows-rank.ts is each of them. */
import { expect, test } from "bun:test";
import { AllGatherDispatcher } from "../../src/models/language/token-dispatcher/all-gather.ts";
import { HierarchicalDispatcher } from "../../src/models/language/token-dispatcher/hierarchical.ts";
import { countingLibrary } from "../../src/native/counting-library.ts";
import { Device } from "../../src/native/device.ts";
import { networkBytes } from "../../src/plan/rates.ts";
import { SimulatedGroup, type Transfer } from "../../src/plan/simulated-group.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import type { SentBytes } from "./hierarchical-rows-rank.ts";
import { runRanks } from "./ranks.ts";

const ways = ["direct", "nodes"] as const;

test("outputs and gradients are those of rows that go to each expert; what leaves a node is what is counted", async () => {
	const outcomes = await runRanks("hierarchical-rows-rank.ts", 4);
	for (const { stderr, exitCode } of outcomes) expect({ stderr, exitCode }).toEqual({ stderr: "", exitCode: 0 });
	const found = outcomes.map(({ stdout }) => JSON.parse(stdout) as SentBytes[]);
	const total = (one: number, value: (of: SentBytes) => number) =>
		found.map((cases) => value(cases[one]!)).reduce((sum, own) => sum + own, 0);
	expect(found[0]!.length).toBe(7);
	for (const [one, { rowBytes, besideBytes }] of found[0]!.entries()) {
		for (const way of ways) {
			// Rows with what goes beside them one way, rows alone the other.
			const expected = total(one, ({ rows }) => rows[way]) * (2 * rowBytes + besideBytes[way]);
			for (const pass of ["forward", "backward"] as const) {
				expect(total(one, ({ sent }) => sent[way][pass])).toBe(expected);
			}
		}
		expect(total(one, ({ rows }) => rows.nodes)).toBeLessThan(total(one, ({ rows }) => rows.direct));
	}
	// The last case has even routing: a plan counts as many bytes as were sent.
	const mean = total(6, ({ sent }) => sent.nodes.forward + sent.nodes.backward) / found.length;
	expect(Math.abs(planned("nodes").bytes("exchangeRows", 2) / mean - 1)).toBeLessThan(0.01);
}, 60_000);

/** Dispatch and combine of 700 tokens of 6 choices among 8 experts on each of four ranks, as a plan counts it for one of them. */
function planned(kind: "nodes" | "gathered") {
	const [tokens, topk, width, localExperts] = [700, 6, 5, 8];
	const seen: Transfer[] = [];
	using device = Device.open(countingLibrary({ kind: "cpu", observe: () => {} }));
	const imagination = { observe: (one: Transfer) => seen.push(one), integers: () => new Int32Array(0), imbalance: 1 };
	const group = (name: string, ranks: number[]) => new SimulatedGroup(name, ranks, 0, imagination);
	const nodes = { within: group("within", [0, 1]), between: group("between", [0, 2]) };
	const capacity = { bound: null, mostTokens: tokens };
	const members = { group: group("all", [0, 1, 2, 3]), expertTensor: 1, localExperts, capacity, nodes };
	const slotted = (shape: number[]) => {
		using plain = Tensor.empty(device, shape);
		return plain.withGradient(new GradientSlot(device, shape, "f32"));
	};
	const tape = new Tape(device, { recording: true, training: true });
	using u = slotted([tokens, width]);
	using probabilities = slotted([tokens, topk]);
	using expertIndex = Tensor.empty(device, [tokens, topk], "i32");
	const routing = { expertIndex, probabilities };
	using dispatcher =
		kind === "nodes"
			? new HierarchicalDispatcher(tape, u, routing, members, null, null)
			: new AllGatherDispatcher(tape, u, routing, members, null);
	let expertRows = 0;
	{
		using arrived = dispatcher.finishDispatch();
		expertRows = arrived.offsets.toInt32().at(-1)!;
		dispatcher.startCombine(arrived.rows);
	}
	using y = dispatcher.finishCombine();
	y.gradient!.accumulate(Tensor.empty(device, y.shape));
	tape.backward();
	const bytes = (of: Transfer["kind"], ranksPerNode: number) =>
		seen.filter(({ kind }) => kind === of).reduce((sum, one) => sum + networkBytes(one, ranksPerNode), 0);
	return { expertRows, bytes };
}

test("a plan counts the rows that reach a rank's experts, whichever way they go, and all bytes of gathered rows", () => {
	// Of each node's rows a whole number.
	expect(Math.abs(planned("nodes").expertRows - 700 * 6)).toBeLessThan(4);
	expect(planned("gathered").expertRows).toBe(700 * 6);
	// To the three others go 700 rows of 5 and their routing of 12, gradients of both come back; sums and their gradients are rows.
	const { bytes } = planned("gathered");
	expect(bytes("allGather", 1)).toBe(3 * 700 * (5 + 12 + 5) * 4);
	expect(bytes("reduceScatter", 1)).toBe(3 * 700 * (5 + 12 + 5) * 4);
});
