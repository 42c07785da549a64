import { expect, test } from "bun:test";
import { chooseDispatcher, describeChoice } from "../../src/parallel/experts/choose-dispatcher.ts";
import { groupOfOne } from "../../src/parallel/group.ts";

const choice = { topk: 6, ranksPerNode: 8, bounded: false };
const choose = (ranks: number, options: Partial<typeof choice> & { expertTensor?: number; first?: number } = {}) => {
	const { expertTensor = 1, first = 0, ...changed } = options;
	const numbers = Array.from({ length: ranks }, (_, rank) => first + rank);
	return chooseDispatcher({ ranks: numbers, expertTensor }, { ...choice, ...changed });
};

test("few ranks gather all rows, many send a row to each expert", () => {
	expect([1, 2, 5, 6, 7, 8].map((ranks) => choose(ranks))).toEqual([
		"alltoall",
		"allgather",
		"allgather",
		"alltoall",
		"alltoall",
		"alltoall",
	]);
	expect(choose(8, { expertTensor: 2 })).toBe("allgather");
	expect(choose(2, { topk: 2 })).toBe("alltoall");
	expect(choose(2, { bounded: true })).toBe("alltoall");
});

test("several nodes of equally many ranks get a row once", () => {
	expect(choose(16)).toEqual({ ranksPerNode: 8 });
	expect(choose(4, { ranksPerNode: 2 })).toEqual({ ranksPerNode: 2 });
	expect(choose(4, { ranksPerNode: 2, expertTensor: 2 })).toEqual({ ranksPerNode: 2 });
	// Ranks 6 to 9 are two and two of both nodes; 7 to 9 are one and two; 4 of an expert do not fit into two.
	expect(choose(4, { first: 6 })).toEqual({ ranksPerNode: 8 });
	expect(choose(3, { first: 7 })).toBe("alltoall");
	expect(choose(4, { ranksPerNode: 2, expertTensor: 4 })).toBe("alltoall");
});

test("the sentence counts rows", () => {
	const group = { ...groupOfOne("tp_ep", 0), ranks: [0, 1], size: 2 };
	const say = (dispatcher: "alltoall" | "allgather", bounded: boolean) =>
		describeChoice({ dispatcher, group, expertTensor: 1 }, { ...choice, bounded });
	const counts = "alltoall sends 3 rows a token to the other ranks, allgather 1";
	expect(say("allgather", false)).toBe(`moe-token-dispatcher-type auto is allgather: ${counts}.`);
	expect(say("alltoall", true)).toBe(`moe-token-dispatcher-type auto is alltoall: ${counts}, without a bound.`);
	const nodes = { between: group, within: group };
	expect(describeChoice({ dispatcher: nodes, group, expertTensor: 1 }, choice)).toBe(
		"moe-token-dispatcher-type auto is flex: experts are on 2 nodes, and a row goes to each once.",
	);
});
