/**
 * Ranks of a run find each other over TCP, on connections whose sides have proved that they know the run's secret
 * (proven-connection.ts). A rank describes itself, and the host (our launcher, or rank 0) compares the description with
 * its own. Where there are several machines the first rank of each speaks for its neighbours too (neighbours.ts). When all
 * ranks are there the host tells them where the shared memory of the run is. On every other machine the first rank is asked to
 * make that first.
 *
 *     rank → host   IDENTITY
 *     rank → host   NEIGHBOURS or TROUBLE   by the first rank of a machine, as they come
 *     host → rank   LEAD                    to the first rank of another machine
 *     rank → host   LED or FAILED           by that
 *     host → rank   WELCOME or REFUSAL
 *
 * Strangers are turned away and harm no rank; a rank of the run that does not fit ends it for all.
 */
import * as v from "valibot";
import { UserError } from "../native/errors.ts";
import { describeIdentity, type Identity, identitySchema, objection } from "./identity.ts";
import { describeSpot, LineConnection, type Spot } from "./line-connection.ts";
import type { Place } from "./place.ts";
import { answerTime, type Failure, ProvenConnection, protocol } from "./proven-connection.ts";
import { Reception } from "./reception.ts";

/** Milliseconds in which a machine has made its part of the run and met rank 0's. */
const leadTime = 30_000;
/** Until the other side says something or leaves. */
const longWait = 2 ** 31 - 1;
const retryInterval = 100;
/** Attempts without an answer, each of `answerTime`: another program that listens there may wait for us to begin. */
const silentAttempts = 3;

const index = v.pipe(v.number(), v.integer(), v.minValue(0));
const port = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(65535));
const leadSchema = v.strictObject({
	/** On which of the run's hosts each rank is (placement.ts). */
	placement: v.array(v.tuple([index, index, index])),
	/** The host whose shared memory is wanted. */
	host: v.pipe(v.number(), v.integer(), v.minValue(1)),
	/** The relay of the host above it; address null: that of rank 0, where it has been met. */
	parent: v.strictObject({ address: v.nullable(v.string()), port }),
	/** From which the relays' key is derived. */
	nonce: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
const answerSchema = v.union([
	v.strictObject({ run: v.string() }),
	v.strictObject({ lead: leadSchema }),
	v.strictObject({ refused: v.string() }),
]);
type Answer = v.InferOutput<typeof answerSchema>;
/** The request to the first rank of another machine. */
export type Lead = v.InferOutput<typeof leadSchema>;
const partSchema = v.strictObject({
	run: v.string(),
	/** Where the relay listens for hosts below; 0: there are none. */
	port,
});
/** A host's part of the run. */
export type Part = v.InferOutput<typeof partSchema>;
const ledSchema = v.union([partSchema, v.strictObject({ failed: v.string() })]);
type Led = v.InferOutput<typeof ledSchema>;
const neighboursSchema = v.strictObject({
	neighbours: v.array(v.strictObject({ rank: index, pid: index, host: v.string() })),
});
/** A neighbour does not fit, or has left. */
const troubleSchema = v.strictObject({ trouble: v.string(), left: v.nullable(index) });
const wordSchema = v.union([ledSchema, neighboursSchema, troubleSchema]);
/** What the first rank of a machine says of the others there. */
export type Word = v.InferOutput<typeof neighboursSchema> | v.InferOutput<typeof troubleSchema>;

interface Member {
	readonly identity: Identity;
	/** null: another rank speaks for this one. */
	readonly connection: ProvenConnection | null;
	/** Takes its answer to a request. */
	answer?: ((led: Led | null) => void) | undefined;
}

/** The run is refused: the host's sentence, which all ranks receive. */
export class RefusedError extends UserError {}

export class RendezvousHost implements Disposable {
	readonly #members = new Map<number, Member>();
	#strangers: string | null = null;
	#failure: string | null = null;
	#left: number | null = null;
	#changed: (() => void) | null = null;
	readonly #receptions: Reception[] = [];

	private constructor(
		/** The identity with which every rank's is compared. */
		private readonly reference: Identity,
		private readonly secret: string | null,
	) {}

	/** `secret` null: processes of this user on this host may join. Throws a UserError that names a port in use. */
	static async open(
		address: string,
		port: number,
		secret: string | null,
		reference: Identity,
	): Promise<RendezvousHost> {
		const host = new RendezvousHost(reference, secret);
		try {
			await host.#listen({ host: address, port }, reference.worldSize);
		} catch (error) {
			throw new UserError(cannotListen(address, port, error as NodeJS.ErrnoException));
		}
		return host;
	}

	/**
	 * Where `neighbours` other ranks of this machine find its first rank. `changed` is called when one has come, and on a failure.
	 * Fails with the system's error code.
	 */
	static async openRoom(
		path: string,
		secret: string,
		reference: Identity,
		neighbours: number,
		changed: () => void,
	): Promise<RendezvousHost> {
		const host = new RendezvousHost(reference, secret);
		host.#changed = changed;
		await host.#listen({ path }, neighbours);
		return host;
	}

	/** Ranks of this machine find the host at `path` too. Fails with the system's error code. */
	async alsoAt(path: string, neighbours: number): Promise<void> {
		await this.#listen({ path }, neighbours);
	}

	async #listen(spot: Spot, expected: number): Promise<void> {
		const turnedAway = (sentence: string) => {
			this.#strangers = sentence;
		};
		const admit = (connection: ProvenConnection) => void this.#admit(connection);
		this.#receptions.push(await Reception.open({ spot, secret: this.secret, expected, admit, turnedAway }));
	}

	/** Why there will be no run; null: nothing is wrong. */
	get failure(): string | null {
		return this.#failure;
	}

	/** The rank whose leaving made gather() fail; null: no rank has left. */
	get left(): number | null {
		return this.#left;
	}

	get port(): number {
		return this.#receptions[0]!.port;
	}

	/**
	 * Resolves when `ranks`, which are all of the run, have met here; no other connection is admitted then. Throws a UserError about the one
	 * that does not fit, or those absent.
	 */
	async gather(ranks: readonly number[], milliseconds: number): Promise<void> {
		const end = performance.now() + milliseconds;
		while (true) {
			if (this.#failure !== null) this.#giveUp(this.#failure);
			// None comes twice, and none but these.
			if (this.#members.size === ranks.length) {
				for (const reception of this.#receptions) reception[Symbol.dispose]();
				return;
			}
			const left = end - performance.now();
			if (left <= 0) {
				const absent = ranks.filter((rank) => !this.#members.has(rank));
				const who = `${absent.length === 1 ? "Rank" : "Ranks"} ${absent.join(", ")} did not join within ${Math.round(milliseconds / 1000)} s.`;
				this.#giveUp(this.#strangers === null ? who : `${who} ${this.#strangers}`);
			}
			await new Promise<void>((resolve) => {
				const timer = setTimeout(resolve, left);
				this.#changed = () => {
					clearTimeout(timer);
					resolve();
				};
			});
		}
	}

	/** Identities of the ranks that have met here, without this process. */
	get members(): ReadonlyMap<number, Identity> {
		return new Map([...this.#members].map(([rank, { identity }]) => [rank, identity]));
	}

	/** Asks a rank to make its host's part of the run; resolves with that and the address it came from. Throws a UserError. */
	async ask(rank: number, lead: Lead): Promise<Part & { readonly address: string }> {
		const member = this.#members.get(rank)!;
		const { identity, connection } = member;
		if (connection === null) throw new UserError(`${describeIdentity(identity)} is spoken for by another rank.`);
		const answered = new Promise<Led | null>((resolve) => {
			member.answer = resolve;
		});
		send(connection, { lead });
		const late = setTimeout(() => member.answer!(null), leadTime);
		const led = await answered;
		clearTimeout(late);
		if (led !== null && "run" in led) return { ...led, address: connection.from };
		const why = led === null ? "It gave no answer." : led.failed;
		throw new UserError(`${describeIdentity(identity)} could not make its host's part of the run: ${why}`);
	}

	/** Tells every rank where the shared memory of the run is, on its machine. */
	welcome(run: string | ((rank: number) => string)): void {
		for (const [rank, { connection }] of this.#members)
			if (connection !== null) send(connection, { run: typeof run === "string" ? run : run(rank) });
	}

	/** Tells every rank why there will be no run. */
	refuse(reason: string): void {
		for (const { connection } of this.#members.values()) if (connection !== null) send(connection, { refused: reason });
	}

	/** A gather() under way fails. */
	[Symbol.dispose](): void {
		this.#fail("The rendezvous was closed.");
		for (const { connection } of this.#members.values()) connection?.[Symbol.dispose]();
		for (const reception of this.#receptions) reception[Symbol.dispose]();
	}

	#giveUp(reason: string): never {
		this.refuse(reason);
		throw new UserError(reason);
	}

	async #admit(connection: ProvenConnection): Promise<void> {
		const identity = v.safeParse(identitySchema, await connection.receive(answerTime));
		if (identity.success) return this.#serve({ identity: identity.output, connection });
		send(connection, {
			refused: "The rendezvous does not understand what this rank says it is: it is of another version.",
		});
		connection[Symbol.dispose]();
		this.#strangers = `A process of another version wanted to join from ${connection.from} and was refused.`;
	}

	/** Takes a rank in, and what it says until it leaves. */
	async #serve(member: Member & { readonly connection: ProvenConnection }): Promise<void> {
		const { identity, connection } = member;
		const wrong = this.#join(member);
		if (wrong !== null) {
			send(connection, { refused: wrong });
			return;
		}
		while (!connection.closed) {
			const word = v.safeParse(wordSchema, await connection.receive(longWait));
			if (!word.success) {
				member.answer?.(null);
				continue;
			}
			if ("trouble" in word.output) {
				if (this.#failure === null) this.#left = word.output.left;
				this.#fail(word.output.trouble);
			} else if ("neighbours" in word.output) {
				for (const about of word.output.neighbours)
					this.#join({ identity: { ...identity, ...about }, connection: null });
			} else {
				member.answer?.(word.output);
			}
		}
		member.answer?.(null);
		if (this.#failure === null) this.#left = identity.rank!;
		this.#fail(`${describeIdentity(identity)} left before all had joined.`);
	}

	/** Returns why the rank does not fit, which ends the meeting for all. */
	#join(member: Member): string | null {
		const { rank } = member.identity;
		const known = this.#members.get(rank ?? -1);
		const wrong =
			objection(member.identity, this.reference) ??
			(rank === null || rank >= this.reference.worldSize || rank === this.reference.rank
				? `${describeIdentity(member.identity)} is not expected by ${describeIdentity(this.reference)}.`
				: known === undefined
					? null
					: `${describeIdentity(member.identity)} and ${describeIdentity(known.identity)} are the same rank.`);
		if (wrong !== null) {
			this.#fail(wrong);
			return wrong;
		}
		this.#members.set(rank!, member);
		this.#changed?.();
		return null;
	}

	#fail(reason: string): void {
		this.#failure ??= reason;
		this.#changed?.();
	}
}

function send(connection: ProvenConnection, answer: Answer): void {
	connection.send(answer);
}

function reply(connection: ProvenConnection, led: Led): void {
	connection.send(led);
}

function cannotListen(address: string, port: number, { code, message }: NodeJS.ErrnoException): string {
	switch (code) {
		case "EADDRINUSE":
			return `Port ${port} of ${address}, where the ranks should meet, is in use by another program; give another MASTER_PORT.`;
		case "EADDRNOTAVAIL":
		case "ENOTFOUND":
			return `MASTER_ADDR ${address} is no address of this host, where rank 0 runs.`;
		case "EACCES":
			return `Port ${port} of ${address}, where the ranks should meet, may not be used; give another MASTER_PORT.`;
		default:
			return `The ranks cannot meet at ${address}:${port} (${code ?? message}).`;
	}
}

/**
 * Meets the host; resolves with the path of the run's shared memory when all ranks are there. Asked to, it makes its host's part
 * with `lead`, which is told the numeric addresses of the host and of this side. Throws UserErrors.
 */
export async function meet(
	place: Place,
	identity: Identity,
	milliseconds: number,
	lead: (wanted: Lead, addresses: { readonly host: string; readonly own: string }) => Part,
	neighbours: Neighbours | null = null,
): Promise<string> {
	try {
		const run = await meetAt(
			{ host: place.address, port: place.port },
			place.secret,
			identity,
			milliseconds,
			lead,
			neighbours,
		);
		neighbours?.welcome(run);
		return run;
	} catch (error) {
		neighbours?.refuse((error as Error).message);
		throw error;
	}
}

/** Ranks of this machine for which this one speaks. */
interface Neighbours {
	/** Tells the host of them as they come. */
	tell(say: (word: Word) => void): void;
	welcome(run: string): void;
	refuse(reason: string): void;
}

/**
 * Meets the first rank of this machine, which speaks for this one; resolves with the path of the run's shared memory, or with null
 * where no such rank is found within `patience` milliseconds. Throws UserErrors.
 */
export async function meetNeighbour(
	path: string,
	secret: string,
	identity: Identity,
	milliseconds: number,
	patience: number,
): Promise<string | null> {
	const end = performance.now() + patience;
	let connection: ProvenConnection;
	try {
		connection = await prove({ path }, secret, end);
	} catch {
		return null;
	}
	using found = connection;
	return await converse(found, describeSpot({ path }), identity, milliseconds, () => {
		throw new UserError("The first rank of this host asks another one to make the host's part of the run.");
	});
}

async function meetAt(
	spot: Spot,
	secret: string | null,
	identity: Identity,
	milliseconds: number,
	lead: (wanted: Lead, addresses: { readonly host: string; readonly own: string }) => Part,
	neighbours: Neighbours | null,
): Promise<string> {
	const began = performance.now();
	using connection = await prove(spot, secret, began + milliseconds);
	const left = milliseconds - (performance.now() - began);
	return await converse(connection, describeSpot(spot), identity, left, lead, neighbours);
}

/** Says who this rank is, and does what the host asks. */
async function converse(
	connection: ProvenConnection,
	where: string,
	identity: Identity,
	milliseconds: number,
	lead: (wanted: Lead, addresses: { readonly host: string; readonly own: string }) => Part,
	neighbours: Neighbours | null = null,
): Promise<string> {
	const end = performance.now() + milliseconds;
	connection.send(identity);
	neighbours?.tell((word) => connection.send(word));
	while (true) {
		const answer = v.safeParse(answerSchema, await connection.receive(end - performance.now()));
		if (!answer.success) {
			throw new UserError(
				connection.closed
					? `The rendezvous at ${where} ended before all ranks had joined.`
					: `Not all ranks met at ${where} within ${Math.round(milliseconds / 1000)} s.`,
			);
		}
		if ("refused" in answer.output) throw new RefusedError(answer.output.refused);
		if ("run" in answer.output) return answer.output.run;
		try {
			reply(connection, lead(answer.output.lead, { host: connection.address, own: connection.localAddress }));
		} catch (error) {
			reply(connection, { failed: (error as Error).message });
			throw error;
		}
	}
}

/** Tries until the host takes this rank in: strangers may crowd it out for a while. */
async function prove(spot: Spot, secret: string | null, end: number): Promise<ProvenConnection> {
	const where = describeSpot(spot);
	for (let silent = 0, attempts = 1; ; attempts++) {
		const connection = await reach(spot, end);
		const outcome = await ProvenConnection.introduce(connection, secret);
		if (outcome instanceof ProvenConnection) return outcome;
		connection.drop();
		if (outcome.kind === "silent") silent++;
		else if (outcome.kind !== "gone") throw new UserError(notOurs(where, outcome));
		if (silent === silentAttempts) {
			throw new UserError(
				`What listens at ${where} says nothing: it is no rendezvous of mimo, or its host is overloaded; give another MASTER_PORT.`,
			);
		}
		if (performance.now() + retryInterval > end) {
			throw new UserError(
				`The rendezvous at ${where} has not taken this rank in, in ${attempts} attempts: others connect there all the time and keep it busy.`,
			);
		}
		await Bun.sleep(retryInterval);
	}
}

/** Describes the program that listens where the ranks should meet and is no host of this run. */
function notOurs(where: string, failure: Failure): string {
	switch (failure.kind) {
		case "version":
			return `The rendezvous at ${where} is of another version (${failure.version}, here ${protocol}).`;
		case "refused":
			return "This process has not the secret of the run (MIMO_SECRET) that meets here.";
		case "secret":
			return `The rendezvous at ${where} has not the secret of this run (MIMO_SECRET).`;
		case "owner":
			return `The rendezvous at ${where} and this rank do not belong to the same user, and the run has no secret (MIMO_SECRET).`;
		default:
			return `What listens at ${where} is no rendezvous of mimo; give another MASTER_PORT.`;
	}
}

/** Tries until the host is there. */
async function reach(spot: Spot, end: number): Promise<LineConnection> {
	while (true) {
		try {
			return await LineConnection.open(spot, Math.max(1, Math.min(answerTime, end - performance.now())));
		} catch (error) {
			const code = (error as NodeJS.ErrnoException).code;
			if (performance.now() + retryInterval < end && code !== "ENOTFOUND") {
				await Bun.sleep(retryInterval);
				continue;
			}
			throw new UserError(`Nobody answers at ${describeSpot(spot)}, where the ranks should meet (${code}).`);
		}
	}
}
