/** Slurm's variables: node lists, task counts, and the rank of a task. */
import { expect, test } from "bun:test";
import { placeFromEnvironment } from "../../src/launch/place.ts";
import { expandNodeList, expandTaskCounts, placeFromSlurm } from "../../src/launch/slurm.ts";

test("a node list expands to host names", () => {
	for (const [list, names] of [
		["n1", "n1"],
		["n[1-3,7]", "n1 n2 n3 n7"],
		["gpu-a[008-011]-ib", "gpu-a008-ib gpu-a009-ib gpu-a010-ib gpu-a011-ib"],
		["login,n[9-10],x[1]y[2-3]", "login n9 n10 x1y2 x1y3"],
		["rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"],
		["", ""],
	] as const) {
		expect(expandNodeList(list).join(" ")).toBe(names);
	}
	expect(expandNodeList("n[1-100]")).toHaveLength(100);
	expect(() => expandNodeList("n[1-3")).toThrow("has no ] for its [");
});

test("task counts expand to a count for each node", () => {
	expect(expandTaskCounts("8(x3),4")).toEqual([8, 8, 8, 4]);
	expect(expandTaskCounts("2")).toEqual([2]);
	expect(() => expandTaskCounts("two")).toThrow("is not a list of counts");
});

test.each([
	["n[1-999999999]", expandNodeList],
	["n[1-2000][1-2000]", expandNodeList],
	[Array(100).fill("n[1-100000]").join(), expandNodeList],
	["2(x999999999)", expandTaskCounts],
])("a list of more nodes than any cluster has is refused: %#", (list, expand) => {
	expect(() => expand(list)).toThrow(/^The list .* stands for more than 1048576 nodes\.$/);
});

const step = {
	SLURM_JOB_ID: "4711",
	SLURM_STEP_ID: "0",
	SLURM_PROCID: "11",
	SLURM_STEP_NUM_TASKS: "12",
	SLURM_LOCALID: "3",
	SLURM_NODEID: "1",
	SLURM_STEP_TASKS_PER_NODE: "8,4",
	SLURM_STEP_NODELIST: "n[3,5]",
	SLURM_LAUNCH_NODE_IPADDR: "10.0.0.3",
};

test("a task has its rank, its node and the address of rank 0", () => {
	const place = placeFromSlurm(step)!;
	expect(place).toMatchObject({ rank: 11, worldSize: 12, localRank: 3, localSize: 4, node: "1", launcher: null });
	expect(place).toMatchObject({ address: "n3", fallbackAddress: "10.0.0.3", port: 20_000 + ((4711 * 16) % 20_000) });
	// The port differs between job steps.
	const other = placeFromSlurm({ ...step, SLURM_STEP_ID: "1" })!;
	expect(other.port).not.toBe(place.port);
	// The secret does not follow from the job's number.
	expect([place.secret, other.secret]).toEqual([null, null]);
	expect(placeFromSlurm({ ...step, MIMO_SECRET: "of the job" })!.secret).toBe("of the job");
	expect(placeFromSlurm({ ...step, SLURM_STEP_NODELIST: "n3" })!.address).toBe("127.0.0.1");
	expect(placeFromSlurm({ ...step, MASTER_ADDR: "head", MASTER_PORT: "5" })).toMatchObject({
		address: "head",
		fallbackAddress: null,
		port: 5,
	});
	// torchrun's variables win: it may run inside a job step.
	const torchrun = { RANK: "0", WORLD_SIZE: "2", MASTER_ADDR: "localhost", MASTER_PORT: "29500" };
	expect(placeFromEnvironment({ ...step, ...torchrun })).toMatchObject({ rank: 0, worldSize: 2 });
	expect(placeFromEnvironment(step)).toEqual(place);
});

test("a batch script and a step of one task launch their ranks themselves", () => {
	const { SLURM_STEP_ID: _, ...batch } = step;
	expect(placeFromSlurm(batch)).toBeNull();
	expect(placeFromSlurm({ ...step, SLURM_STEP_NUM_TASKS: "1" })).toBeNull();
	expect(placeFromSlurm({})).toBeNull();
});

test("missing and wrong variables are named", () => {
	const { SLURM_STEP_NODELIST: _, ...without } = step;
	expect(() => placeFromSlurm(without)).toThrow("has no SLURM_STEP_NODELIST or SLURM_JOB_NODELIST or SLURM_NODELIST");
	expect(() => placeFromSlurm({ ...step, SLURM_PROCID: "x" })).toThrow("SLURM_PROCID=x; allowed is an integer");
});
