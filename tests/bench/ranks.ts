/**
 * Large runs, played on this machine's processors: their ranks meet, relay and fail as those of a run that trains do, with the
 * same code, many hosts in a process (ranks-part.ts). No rank trains.
 *
 *   bun tests/bench/ranks.ts [--hosts 8,64,512] [--ranks-a-host 8] [--failures say,kill,stop]
 *
 * Prints for each number of hosts: seconds from the first rank to the moments when rank 0 has met all hosts and has had them make
 * their parts, and when it knows that all have joined (all hosts share this machine's processors); of both the processor time of rank
 * 0's process, and that of all other hosts; rank 0's memory, beyond that before the ranks met
 * and the part of it that ranks share; its sockets, at most and once all have met; its messages while ranks meet, while the run
 * starts, and in a second of the run. Then, on the largest run, for each failure how long it takes until every host knows of
 * it and by which name: "say": a rank of a host furthest down says so; "kill", "stop": the process of host 1, which has hosts
 * below it, is killed or stopped. Exits with 1 when a host is told of another rank, or later than 10 s.
 */
import { join } from "node:path";
import { parseArgs } from "node:util";
import { freePort } from "../launch/launched.ts";

/** Processes that play the hosts. */
const players = 8;
const limit = { start: 300_000, failure: 10_000 };

interface Event {
	readonly event: string;
	/** Milliseconds. */
	readonly at: number;
	readonly [key: string]: unknown;
}

interface Status extends Event {
	readonly sockets: number;
	readonly mostSockets: number;
	readonly met: { readonly sent: number; readonly received: number };
	readonly relayed: { readonly sent: number; readonly received: number };
	readonly resident: number;
	readonly shared: number;
	readonly processor: number;
}

/** A process that plays some hosts, and what it has said. */
class Player {
	readonly events: Event[] = [];
	readonly process: Bun.Subprocess<"pipe", "pipe", "pipe">;
	readonly errors: Promise<string>;
	readonly read: Promise<void>;

	constructor(
		readonly firstHost: number,
		readonly hosts: number,
		args: readonly (string | number)[],
	) {
		this.process = Bun.spawn([process.execPath, join(import.meta.dir, "ranks-part.ts"), ...args.map(String)], {
			stdin: "pipe",
			stdout: "pipe",
			stderr: "pipe",
		});
		this.errors = this.process.stderr.text();
		this.read = this.#read();
	}

	async #read(): Promise<void> {
		let rest = "";
		for await (const text of this.process.stdout.pipeThrough(new TextDecoderStream())) {
			const lines = (rest + text).split("\n");
			rest = lines.pop()!;
			for (const line of lines) this.events.push(JSON.parse(line));
		}
	}

	ask(command: string): void {
		this.process.stdin.write(`${command}\n`);
		this.process.stdin.flush();
	}

	async said(event: string, milliseconds: number, count = 1): Promise<Event> {
		const end = performance.now() + milliseconds;
		while (performance.now() < end) {
			const found = this.events.filter((one) => one.event === event);
			if (found.length >= count) return found[count - 1]!;
			if (this.process.exitCode !== null) break;
			await Bun.sleep(10);
		}
		throw new Error(`The process of hosts from ${this.firstHost} on did not say "${event}": ${await this.stop()}`);
	}

	async stop(): Promise<string> {
		this.process.kill("SIGKILL");
		return (await this.errors).trim();
	}
}

/** A run of `hosts` hosts whose ranks have all joined. Host 1 has a process of its own, as rank 0 has. */
class PlayedRun {
	private constructor(
		readonly root: Player,
		readonly others: readonly Player[],
		/** When rank 0 has met all, and when it knows that all have joined. */
		readonly met: Status,
		readonly joined: Status,
		readonly seconds: { readonly met: number; readonly joined: number },
	) {}

	static async start(hosts: number, each: number): Promise<PlayedRun> {
		const port = await freePort();
		const about = [each, hosts * each, port];
		const root = new Player(0, 1, ["root", 1, ...about]);
		const others: Player[] = [];
		const play = (first: number, count: number) => {
			if (count > 0) others.push(new Player(first, count, [first, count, ...about]));
		};
		play(0, 1);
		play(1, Math.min(1, hosts - 1));
		const share = Math.ceil((hosts - 2) / players);
		for (let first = 2; first < hosts; first += share) play(first, Math.min(share, hosts - first));
		const began = await root.said("begins", limit.start);
		const joined = (await root.said("joined", limit.start)) as Status;
		const met = root.events.find(({ event }) => event === "met") as Status;
		const seconds = { met: (met.at - began.at) / 1000, joined: (joined.at - began.at) / 1000 };
		return new PlayedRun(root, others, met, joined, seconds);
	}

	/** Seconds that the processes of the other hosts have worked since they began. */
	async processorOfOthers(): Promise<number> {
		let sum = 0;
		for (const player of this.others) {
			player.ask("status");
			const begins = (await player.said("begins", 10_000)) as Status;
			sum += ((await player.said("status", 10_000)) as Status).processor - begins.processor;
		}
		return sum;
	}

	/** The status that rank 0's process reports after `seconds` more. */
	async statusAfter(seconds: number): Promise<Status> {
		await Bun.sleep(seconds * 1000);
		const count = this.root.events.filter(({ event }) => event === "status").length;
		this.root.ask("status");
		return (await this.root.said("status", 10_000, count + 1)) as Status;
	}

	/** All ranks finish. Throws when a process does not end well. */
	async finish(): Promise<void> {
		for (const player of [this.root, ...this.others]) player.ask("finish");
		for (const player of [this.root, ...this.others]) {
			const code = await Promise.race([player.process.exited, Bun.sleep(30_000)]);
			if (code !== 0) throw new Error(`A process of a run that finishes ends with ${code}: ${await player.stop()}`);
		}
	}

	async stop(): Promise<void> {
		await Promise.all([this.root, ...this.others].map((player) => player.stop()));
	}
}

interface Told {
	readonly seconds: number;
	/** Ranks that hosts were told of. */
	readonly ranks: readonly unknown[];
	readonly hosts: number;
	readonly diagnosis: string;
}

/** Seconds from a failure until every host that still runs knows of it. */
async function failureOf(run: PlayedRun, kind: string, hosts: number, each: number): Promise<Told> {
	const inner = run.others[1]!;
	const last = run.others.at(-1)!;
	const began = performance.timeOrigin + performance.now();
	if (kind === "say") last.ask(`fail ${(hosts - 1) * each}`);
	else inner.process.kill(kind === "kill" ? "SIGKILL" : "SIGSTOP");
	const alive = [run.root, ...run.others.slice(1)].filter((player) => kind === "say" || player !== inner);
	const expected = alive.reduce((sum, player) => sum + player.hosts, 0);
	const told = () => alive.flatMap(({ events }) => events.filter(({ event }) => event === "failed"));
	const end = performance.now() + 2 * limit.failure;
	while (told().length < expected && performance.now() < end) await Bun.sleep(20);
	const all = told();
	await run.root.process.exited;
	await run.root.read;
	const diagnosis = (await run.root.errors).trim();
	const latest = Math.max(...all.map(({ at }) => at));
	return {
		seconds: (latest - began) / 1000,
		ranks: [...new Set(all.map(({ rank }) => rank))],
		hosts: all.length,
		diagnosis,
	};
}

export interface Started {
	readonly hosts: number;
	readonly ranks: number;
	readonly seconds: PlayedRun["seconds"];
	readonly met: Status;
	readonly joined: Status;
	readonly before: Status;
	/** Seconds that the processes of all other hosts have worked. */
	readonly others: number;
	/** Messages of rank 0's relay in a second. */
	readonly rate: number;
	readonly after: Status;
}

export async function startOf(hosts: number, each: number): Promise<Started> {
	const run = await PlayedRun.start(hosts, each);
	try {
		const others = await run.processorOfOthers();
		const early = await run.statusAfter(1);
		const after = await run.statusAfter(3);
		const count = ({ relayed }: Status) => relayed.sent + relayed.received;
		const rate = (count(after) - count(early)) / ((after.at - early.at) / 1000);
		const before = run.root.events.find(({ event }) => event === "begins") as Status;
		await run.finish();
		const { seconds, met, joined } = run;
		return { hosts, ranks: hosts * each, seconds, met, joined, before, rate, after, others };
	} finally {
		await run.stop();
	}
}

export async function playFailure(kind: string, hosts: number, each: number): Promise<Told> {
	const run = await PlayedRun.start(hosts, each);
	try {
		await Bun.sleep(1000);
		return await failureOf(run, kind, hosts, each);
	} finally {
		await run.stop();
	}
}

/** The rank that hosts must be told of. */
export function blamed(kind: string, hosts: number, each: number): number {
	return kind === "say" ? (hosts - 1) * each : each;
}

if (import.meta.main) {
	const { values: flags } = parseArgs({
		options: {
			hosts: { type: "string", default: "8,64,512" },
			"ranks-a-host": { type: "string", default: "8" },
			failures: { type: "string", default: "say,kill,stop" },
		},
	});
	const sizes = flags.hosts.split(",").map(Number);
	const each = Number(flags["ranks-a-host"]);
	const megabytes = (kilobytes: number) => (kilobytes / 1024).toFixed(1);
	console.log(
		"hosts  ranks  met, s  joined, s  rank 0's: met, joined  all others'  memory, MiB  shared, MiB  sockets  then  meeting in/out  start in/out  per second",
	);
	for (const hosts of sizes) {
		const { ranks, seconds, met, joined, before, others, rate, after } = await startOf(hosts, each);
		const columns: readonly [string | number, number][] = [
			[hosts, 6],
			[ranks, 6],
			[seconds.met.toFixed(1), 7],
			[seconds.joined.toFixed(1), 10],
			[[met, joined].map(({ processor }) => (processor - before.processor).toFixed(2)).join(", "), 22],
			[others.toFixed(1), 12],
			[megabytes(after.resident - before.resident), 12],
			[megabytes(after.shared - before.shared), 12],
			[joined.mostSockets, 8],
			[after.sockets, 5],
			[`${joined.met.received}/${joined.met.sent}`, 15],
			[`${joined.relayed.received}/${joined.relayed.sent}`, 13],
			[rate.toFixed(0), 0],
		];
		console.log(columns.map(([text, width]) => String(text).padEnd(width)).join(" "));
	}
	const hosts = Math.max(...sizes);
	let good = true;
	for (const kind of flags.failures.split(",").filter(Boolean)) {
		const { seconds, ranks, hosts: told, diagnosis } = await playFailure(kind, hosts, each);
		good &&= seconds * 1000 <= limit.failure && String(ranks) === String(blamed(kind, hosts, each));
		console.log(`${kind}: ${told} hosts told of rank ${ranks} within ${seconds.toFixed(2)} s`);
		console.log(diagnosis.replace(/^/gm, "  "));
	}
	process.exit(good ? 0 : 1);
}
