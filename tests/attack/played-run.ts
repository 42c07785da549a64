/** A run of rank.ts on two played hosts, with an attacker of a kind beside it that attacks and rests by turns. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { freePort } from "../launch/launched.ts";

export interface Played {
	readonly steps: number;
	/** Milliseconds that the second host comes later, and waits once more before it meets the first one's relay. */
	readonly hold: number;
	/** Milliseconds from a step to the next. */
	readonly period: number;
	/** A command that starts the ranks' programs, or none: realTime. */
	readonly prefix: readonly string[];
}

/** A step of a rank, as rank.ts prints it: milliseconds of the machine's clock, and of processor time. */
export interface Step {
	readonly rank: number;
	readonly step: number;
	readonly due: number;
	readonly ended: number;
	readonly done: number;
	readonly processor: number;
}

export interface Attack {
	readonly connections: number;
	readonly sent: number;
}

export interface Outcome {
	readonly steps: readonly Step[];
	/** When attackers attacked: milliseconds of the machine's clock from the order to attack to the answer that all is closed. */
	readonly attacks: readonly (readonly [number, number])[];
	/** The last line of every rank: losses and weights. */
	readonly results: readonly string[];
	/** The most of rank 0: bytes that are resident, and descriptors. */
	readonly resident: number;
	readonly descriptors: number;
	readonly errors: string;
	/** Connections and bytes of the attackers. */
	readonly attack: Attack;
}

const ranks = 4;
/** The rank whose steps are done when there are news of rank 0's relay. */
export const hearingRank = 2;
/**
 * Runs a program in real time where the system allows that, else as others: what else runs on the machine, and the attackers,
 * then slow ranks through their ports alone and not through their processors.
 */
export function realTime(): readonly string[] {
	const prefix = ["chrt", "--rr", "1"];
	return Bun.which(prefix[0]!) !== null && Bun.spawnSync([...prefix, "true"]).success ? prefix : [];
}

/** Milliseconds of an attack and of a rest on average; each is a random share from 0.7 to 1.3 of it. */
const mean = { attack: 10_000, rest: 5_000 };

/** Runs all ranks to their end; the attacker is there from before they meet. `kind` null: its attacks are none. */
export async function play(kind: string | null, { steps, hold, period, prefix }: Played): Promise<Outcome> {
	const port = await freePort();
	const program = [process.execPath, join(import.meta.dir, "rank.ts"), ...[steps, hold, period].map(String)];
	const start = (rank: number) =>
		Bun.spawn([...prefix, ...program], {
			env: {
				...process.env,
				RANK: String(rank),
				WORLD_SIZE: String(ranks),
				LOCAL_RANK: String(rank % 2),
				LOCAL_WORLD_SIZE: "2",
				MASTER_ADDR: "127.0.0.1",
				MASTER_PORT: String(port),
				MIMO_SECRET: "of the attacked run",
				NCCL_HOSTID: rank < 2 ? "a" : "b",
			},
			stdout: "pipe",
			stderr: "pipe",
		});
	const children = [start(0)];
	const zero = children[0]!.pid;
	const attacker = kind === null ? null : new Attacker(kind, zero);
	const most = { resident: 0, descriptors: 0 };
	const look = setInterval(() => {
		most.resident = Math.max(most.resident, residentBytes(zero));
		most.descriptors = Math.max(most.descriptors, countDescriptors(zero));
	}, 100);
	const late = setTimeout(
		() => {
			for (const child of children) child.kill("SIGKILL");
			attacker?.kill();
		},
		steps * period * 3 + 60_000,
	);
	try {
		await attacker?.begun();
		const turns = new Turns(attacker, 2 * hold);
		children.push(start(1));
		await Bun.sleep(hold);
		children.push(start(2), start(3));
		const lines = await Promise.all(children.map(async (child) => (await child.stdout.text()).trim().split("\n")));
		const errors = await Promise.all(children.map((child) => child.stderr.text()));
		const attacks = await turns.end();
		return {
			steps: lines.flatMap((of, rank) => of.slice(0, -1).map((line) => ({ rank, ...JSON.parse(line) }) as Step)),
			attacks,
			results: lines.map((of) => of.at(-1)!),
			...most,
			errors: errors.join(""),
			attack: attacker === null ? { connections: 0, sent: 0 } : await attacker.counts(),
		};
	} finally {
		clearInterval(look);
		clearTimeout(late);
		attacker?.kill();
		for (const child of children) child.kill("SIGKILL");
	}
}

/** An attacker.ts. */
class Attacker {
	readonly #process: Bun.Subprocess<"pipe", "pipe", "inherit">;
	readonly #lines: AsyncIterator<string>;

	constructor(kind: string, pid: number) {
		const command = [process.execPath, join(import.meta.dir, "attacker.ts"), kind, String(pid)];
		this.#process = Bun.spawn(command, { stdin: "pipe", stdout: "pipe" });
		this.#lines = linesOf(this.#process.stdout)[Symbol.asyncIterator]();
	}

	/** Resolves when it has connected to the process that it attacks: the others start then, however slowly that process came up. */
	async begun(): Promise<void> {
		await this.#lines.next();
	}

	attack(): void {
		this.#order();
	}

	/** Resolves when it has no connection left. */
	async rest(): Promise<void> {
		this.#order();
		await this.#lines.next();
	}

	async counts(): Promise<Attack> {
		this.#process.kill("SIGTERM");
		return JSON.parse((await this.#lines.next()).value ?? "") as Attack;
	}

	kill(): void {
		this.#process.kill("SIGKILL");
	}

	#order(): void {
		this.#process.stdin.write("turn\n");
		void this.#process.stdin.flush();
	}
}

async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of stream) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		yield* lines;
	}
}

/** Attacks and rests by turns, each for a random time. Begins with an attack that is longer by `first` milliseconds. */
class Turns {
	readonly #attacks: [number, number][] = [];
	readonly #taken: Promise<void>;
	readonly #over = Promise.withResolvers<void>();
	#ended = false;

	constructor(
		private readonly attacker: Attacker | null,
		first: number,
	) {
		this.#taken = this.#take(first);
		void this.#over.promise.then(() => {
			this.#ended = true;
		});
	}

	/** When it has attacked. */
	async end(): Promise<readonly (readonly [number, number])[]> {
		this.#over.resolve();
		await this.#taken;
		return this.#attacks;
	}

	async #take(first: number): Promise<void> {
		for (let begin = Date.now(), extra = first; ; begin = Date.now(), extra = 0) {
			await this.#pass(mean.attack, extra);
			if (!this.#ended) await this.attacker?.rest();
			this.#attacks.push([begin, Date.now()]);
			if (!this.#ended) await this.#pass(mean.rest, 0);
			if (this.#ended) return;
			this.attacker?.attack();
		}
	}

	#pass(milliseconds: number, extra: number): Promise<unknown> {
		return Promise.race([Bun.sleep(milliseconds * (0.7 + 0.6 * Math.random()) + extra), this.#over.promise]);
	}
}

function residentBytes(pid: number): number {
	try {
		return 1024 * Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1] ?? 0);
	} catch {
		return 0;
	}
}

function countDescriptors(pid: number): number {
	try {
		return readdirSync(`/proc/${pid}/fd`).length;
	} catch {
		return 0;
	}
}
