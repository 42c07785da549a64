/** Which host has which ranks in each generation of a run over several hosts, and when a failure ends it. */
import { expect, test } from "bun:test";
import { Leader, type Succession } from "../../src/launch/agents/leader.ts";
import type { AgentFailure, LeaderMessage } from "../../src/launch/agents/messages.ts";

/** Hosts of one agent with two ranks each, of which the last `spares` are spare; the run has no rank there. */
class Scene {
	readonly said: string[] = [];
	/** What each agent was told, the newest last. */
	readonly told = new Map<number, LeaderMessage[]>();
	readonly leader: Leader;

	/** `fewer`: hosts that the run can do with. */
	constructor(
		hosts: number,
		{ spares = 0, own = 0, succession = null as Succession | null, fewer = [] as readonly number[] } = {},
	) {
		const restarts = { most: 3, windowMinutes: 60, spares };
		const layouts = [hosts - spares, ...fewer].map((count) => ({ ranks: 2 * count, flags: [] }));
		const options = { agents: hosts, layouts, perHost: 2, restarts, timeoutMinutes: 1 };
		this.leader = new Leader({ ...options, log: (line) => this.said.push(line) }, own, succession);
	}

	join(agent: number, generation = 0, first: number | null = null): string | null {
		const about = { agent, node: `n${agent}`, host: `h${agent}`, localRank: 0, seats: 2, address: `10.0.0.${agent}` };
		const hello = { ...about, port: 1, meeting: 100 + agent, generation, first, program: "p" };
		const told: LeaderMessage[] = [];
		this.told.set(agent, told);
		return this.leader.add(hello, (message) => told.push(message));
	}

	/** First ranks by agent, as they were last told. */
	firsts(): (number | null)[] {
		return [...this.told.values()].map((told) => {
			const last = told.findLast((message) => "begin" in message);
			return last === undefined ? null : last.begin.first;
		});
	}

	last(agent: number): LeaderMessage | undefined {
		return this.told.get(agent)!.at(-1);
	}

	stopped(agent: number, generation: number, failure: AgentFailure | null = null): void {
		this.leader.hear(agent, { stopped: { generation, meeting: 200 + agent, failure } });
	}
}

const killed = (rank: number): AgentFailure => ({
	...{ rank, reason: "it was killed by SIGKILL", step: 5, own: false, code: 1, interrupted: false },
});

test("a run begins when all hosts have come, the last of which are spare", () => {
	const scene = new Scene(3, { spares: 1 });
	scene.join(2);
	scene.join(0);
	expect(scene.firsts()).toEqual([null, null]);
	scene.join(1);
	expect([...scene.told.keys()]).toEqual([2, 0, 1]);
	expect(scene.firsts()).toEqual([null, 0, 2]);
	// Ranks meet at the host of rank 0, which is the leader's.
	expect(scene.last(1)).toEqual({
		begin: { generation: 0, layout: 0, first: 2, meeting: { address: null, port: 100 } },
	});
});

test("a lost rank keeps its host; the next generation begins when all have stopped", () => {
	const scene = new Scene(2);
	for (const agent of [0, 1]) scene.join(agent);
	scene.leader.hear(1, { failed: { generation: 0, failure: killed(3) } });
	expect(scene.last(0)).toEqual({ stop: { generation: 0, rank: 3, reason: "it was killed by SIGKILL" } });
	scene.stopped(1, 0, killed(3));
	expect(scene.last(0)).toHaveProperty("stop");
	scene.stopped(0, 0);
	expect(scene.last(1)).toEqual({
		begin: { generation: 1, layout: 0, first: 2, meeting: { address: null, port: 200 } },
	});
	for (const agent of [0, 1]) scene.leader.hear(agent, { met: { generation: 1 } });
	expect(scene.said.at(-1)).toMatch(/^Restart 1 of at most 3 within 60 minutes: every host keeps its ranks; all ranks/);
	for (const agent of [0, 1]) scene.leader.hear(agent, { finished: { generation: 1, code: 0 } });
	expect(scene.last(1)).toEqual({ end: { code: 0 } });
});

test("a spare host takes the ranks of a lost one, which is spare when it returns", () => {
	const scene = new Scene(3, { spares: 1 });
	for (const agent of [0, 1, 2]) scene.join(agent);
	scene.leader.lose(1, "its connection has ended", true);
	scene.stopped(0, 0);
	expect(scene.firsts()).toEqual([0, 2, 2]);
	scene.join(1);
	expect(scene.said.at(-1)).toBe("Host h1 has joined and is spare.");
	expect(scene.last(2)).toHaveProperty("members.members.length", 3);
	scene.leader.lose(2, "its connection has ended", true);
	scene.stopped(0, 1);
	expect(scene.last(1)).toHaveProperty("begin.first", 2);
});

test("without a spare host, and after too many restarts, the run ends", () => {
	const scene = new Scene(2);
	for (const agent of [0, 1]) scene.join(agent);
	scene.leader.lose(1, "its connection has ended", true);
	scene.stopped(0, 0);
	expect([scene.last(0), scene.said.at(-1)]).toEqual([
		{ end: { code: 1 } },
		"The run is not restarted: a host is lost, and no other is spare.",
	]);
	const often = new Scene(1);
	often.join(0);
	for (let generation = 0; generation < 4; generation++) {
		often.leader.hear(0, { failed: { generation, failure: killed(0) } });
		often.stopped(0, generation);
	}
	expect(often.said.at(-1)).toMatch(/^The run is not restarted: it was restarted 3 times within 60 minutes/);
});

test("a host with a wrong result gives its ranks to a spare one, and gets none after a second", () => {
	let step = 5;
	const wrong = (rank: number) => ({ ...killed(rank), step: step++, own: true, code: 17 });
	const scene = new Scene(3, { spares: 1 });
	for (const agent of [0, 1, 2]) scene.join(agent);
	const fail = (rank: number, agents: readonly [number, number], generation: number) => {
		scene.leader.hear(agents[0], { failed: { generation, failure: wrong(rank) } });
		for (const agent of agents) scene.stopped(agent, generation, agent === agents[0] ? wrong(rank) : null);
		step++;
	};
	fail(3, [1, 0], 0);
	expect(scene.firsts()).toEqual([0, 2, 2]);
	for (const agent of [0, 2]) scene.leader.hear(agent, { met: { generation: 1 } });
	expect(scene.said.at(-1)).toMatch(/: host h2 takes ranks 2 to 3; all ranks have met/);
	// The only spare host had a wrong result as well.
	fail(2, [2, 0], 1);
	expect(scene.last(2)).toMatchObject({ begin: { generation: 2, first: 2 } });
	fail(3, [2, 0], 2);
	expect(scene.last(1)).toMatchObject({ begin: { generation: 3, first: 2 } });
	fail(2, [1, 0], 3);
	expect([scene.last(0), scene.said.at(-1)]).toEqual([
		{ end: { code: 17 } },
		expect.stringContaining("within 60 minutes (max-restarts)"),
	]);
});

test("hosts that had a wrong result each keep their ranks, and so their copies, where no other is spare", () => {
	const scene = new Scene(3, { spares: 1 });
	for (const agent of [0, 1, 2]) scene.join(agent);
	const fail = (agents: readonly [number, number], generation: number, failure: AgentFailure) => {
		scene.leader.hear(agents[0], { failed: { generation, failure } });
		for (const agent of agents) scene.stopped(agent, generation, agent === agents[0] ? failure : null);
	};
	const wrong = (rank: number, step: number) => ({ ...killed(rank), step, own: true, code: 17 });
	// The third host takes ranks 0 and 1, the first one theirs when the second host has failed too.
	fail([0, 1], 0, wrong(0, 5));
	expect(scene.firsts()).toEqual([0, 2, 0]);
	fail([1, 2], 1, wrong(3, 7));
	const places = () => [0, 1, 2].map((agent) => scene.last(agent));
	const before = places();
	expect(before).toMatchObject([{ members: {} }, { begin: { generation: 2, first: 2 } }, { begin: { first: 0 } }]);
	scene.leader.lose(0, "its connection has ended", true);
	fail([1, 2], 2, killed(2));
	expect(places().slice(1)).toMatchObject([{ begin: { generation: 3, first: 2 } }, { begin: { first: 0 } }]);
});

test("with fewer lanes the run goes on without a lost host, and takes it in when it returns", () => {
	const scene = new Scene(3, { fewer: [2, 1] });
	for (const agent of [0, 1, 2]) scene.join(agent);
	scene.leader.lose(1, "its connection has ended", true);
	for (const agent of [0, 2]) scene.stopped(agent, 0);
	expect([0, 2].map((agent) => scene.last(agent))).toMatchObject([
		{ begin: { generation: 1, layout: 1, first: 0 } },
		{ begin: { generation: 1, layout: 1, first: 2 } },
	]);
	for (const agent of [0, 2]) scene.leader.hear(agent, { met: { generation: 1 } });
	expect(scene.said.at(-1)).toMatch(/: the run has 4 of 6 ranks, host h2 takes ranks 2 to 3; all ranks have met/);
	scene.join(1);
	expect(scene.last(0)).toMatchObject({ stop: { reason: "host h1 has come, and the run takes its ranks in" } });
	for (const agent of [0, 2]) scene.stopped(agent, 1);
	expect([0, 1, 2].map((agent) => scene.last(agent))).toMatchObject([
		{ begin: { generation: 2, layout: 0, first: 0 } },
		{ begin: { generation: 2, layout: 0, first: 4 } },
		{ begin: { generation: 2, layout: 0, first: 2 } },
	]);
	for (const agent of [0, 1, 2]) scene.leader.hear(agent, { met: { generation: 2 } });
	expect(scene.said.at(-1)).toMatch(
		/^More hosts: the run has 6 of 6 ranks, host h1 takes ranks 4 to 5; all ranks have/,
	);
});

test("an error of the rank's own program ends the run with its code, before its first step", () => {
	const scene = new Scene(2);
	for (const agent of [0, 1]) scene.join(agent);
	// The other host sees first that the run has failed.
	scene.leader.hear(0, { failed: { generation: 0, failure: { ...killed(3), reason: "No data.", step: 0 } } });
	scene.stopped(0, 0, { ...killed(3), reason: "No data.", step: 0 });
	scene.stopped(1, 0, { ...killed(3), reason: "No data.", step: 0, own: true, code: 2 });
	expect(scene.last(0)).toEqual({ end: { code: 2 } });
	expect(scene.said.at(-1)).toMatch(/failed before its first step/);
});

test("a new leader goes on with more than half of the agents, or with all that can be alive", () => {
	const begun = {
		generation: 4,
		layout: 0,
		history: { ages: [1000], stepped: true },
		former: 0,
		reason: "the leader is lost",
	};
	const scene = new Scene(3, { spares: 1, own: 1, succession: { ...begun, agents: [0, 1, 2] } });
	scene.join(1, 4, 2);
	expect(scene.last(1)).toHaveProperty("stop.generation", 4);
	scene.stopped(1, 4);
	scene.join(2, 4, null);
	expect(scene.firsts()).toEqual([2, 0]);
	expect(scene.last(2)).toHaveProperty("begin.generation", 5);
	// One of two, where the leader is silent: it may go on by itself. Where its process has ended it cannot.
	const silent = new Scene(2, { spares: 1, own: 1, succession: { ...begun, agents: [0, 1] } });
	silent.join(1, 4, null);
	expect(silent.last(1)).toEqual({ end: { code: 75 } });
	const alone = new Scene(2, { spares: 1, own: 1, succession: { ...begun, agents: [1] } });
	alone.join(1, 4, null);
	expect(alone.last(1)).toHaveProperty("begin.first", 0);
});

test("a signal to an agent ends the run, and another configuration is refused", () => {
	const scene = new Scene(2);
	for (const agent of [0, 1]) scene.join(agent);
	scene.leader.hear(1, { failed: { generation: 0, failure: killed(2) } });
	scene.stopped(0, 0);
	const reason = "The run was interrupted by SIGTERM.";
	scene.stopped(1, 0, { ...killed(2), rank: null, reason, code: 143, interrupted: true });
	expect([scene.last(0), scene.said]).toEqual([{ end: { code: 143 } }, [reason]]);
	const other = new Scene(2);
	other.join(0);
	const hello = { agent: 1, node: "n1", host: "h1", localRank: 0, seats: 2, address: "", port: 1, meeting: 2 };
	const refusal = other.leader.add({ ...hello, generation: 0, first: null, program: "q" }, () => {});
	expect(refusal).toBe("The agent of host h1 has another program or configuration than the leader's.");
});
