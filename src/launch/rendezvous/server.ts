/**
 * The server of the rendezvous, in which the ranks of a run find each other over TCP. It runs in this program's launcher, else in
 * rank 0. Both sides of a connection first prove that they know the run's secret (proven-connection.ts). Each rank sends its
 * identity, which the server compares with its own; it requests the whole configuration only if the digests differ, to name the
 * keys that differ. In a run of several machines the first rank of each also registers the other ranks of its machine
 * (local-ranks.ts), so that rank 0 holds a connection a machine. When all ranks have joined, the first rank of every other
 * machine creates that machine's shared memory; then the server sends every rank the path of the shared memory on its machine.
 *
 *     rank → server   INTRODUCTION
 *     server → rank   TELL                    if the digests differ
 *     rank → server   CONFIGURATION           the reply to TELL
 *     rank → server   NEIGHBOURS or TROUBLE   from the first rank of a machine, whenever its local ranks change
 *     server → rank   LEAD                    to the first rank of another machine
 *     rank → server   LED or FAILED           the reply to LEAD
 *     server → rank   WELCOME or REFUSAL
 *
 * A connection that does not prove the secret is refused and has no effect on the run. A rank with the secret but another
 * identity (version, library, configuration) ends the run for all.
 */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import {
	describeIdentity,
	digestOf,
	type Identity,
	type Introduction,
	introductionSchema,
	objection,
} from "./identity.ts";
import type { Spot } from "./line-connection.ts";
import { type Answer, type Lead, type Led, memberMessageSchema, type Part, toldSchema } from "./messages.ts";
import { answerTime, type ProvenConnection } from "./proven-connection.ts";
import { ProvenListener } from "./proven-listener.ts";

/** Milliseconds for another machine to create its shared memory and connect to rank 0's relay. */
const leadTime = 30_000;
/** Milliseconds after a failure in which the server may still learn that its cause is a rank that has left. */
const newsTime = 200;
/** Milliseconds; the largest delay of a timer: waits until the rank sends a message or disconnects. */
const longWait = 2 ** 31 - 1;

interface Member {
	readonly identity: Identity;
	/** null: the rank is registered by the first rank of its machine. */
	readonly connection: ProvenConnection | null;
	/** Resolves the request to create the machine's shared memory. */
	answer?: ((led: Led | null) => void) | undefined;
	/** The rank has reported its failure, so that its disconnection is not reported as well. */
	gaveUp?: boolean;
}

export class RendezvousServer implements Disposable {
	readonly #members = new Map<number, Member>();
	/** The latest refused connection, for the message about absent ranks. */
	#lastRefusal: string | null = null;
	#failure: string | null = null;
	#left: number | null = null;
	#changed: (() => void) | null = null;
	readonly #listeners: ProvenListener[] = [];
	readonly #digest: string;

	private constructor(
		/** The identity with which every rank's is compared. */
		private readonly reference: Identity,
		private readonly secret: string | null,
	) {
		this.#digest = digestOf(reference.configuration);
	}

	/** `secret` null: processes of this user on this host may join. Throws a UserError that names a port in use. */
	static async open(
		address: string,
		port: number,
		secret: string | null,
		reference: Identity,
	): Promise<RendezvousServer> {
		const host = new RendezvousServer(reference, secret);
		try {
			await host.#listen({ host: address, port }, reference.worldSize);
		} catch (error) {
			throw new UserError(cannotListen(address, port, error as NodeJS.ErrnoException));
		}
		return host;
	}

	/**
	 * Opens the server of a machine's first rank, which up to `neighbours` other ranks of the machine join at the abstract socket
	 * `path`. `changed` is called when a rank has joined, and on a failure. Rejects with the system's error.
	 */
	static async openLocal(
		path: string,
		secret: string,
		reference: Identity,
		neighbours: number,
		changed: () => void,
	): Promise<RendezvousServer> {
		const host = new RendezvousServer(reference, secret);
		host.#changed = changed;
		await host.#listen({ path }, neighbours);
		return host;
	}

	/** Lets ranks of this machine also join at the abstract socket `path`. Rejects with the system's error. */
	async alsoAt(path: string, neighbours: number): Promise<void> {
		await this.#listen({ path }, neighbours);
	}

	async #listen(spot: Spot, expected: number): Promise<void> {
		const onRefused = (sentence: string) => {
			this.#lastRefusal = sentence;
		};
		const admit = (connection: ProvenConnection) => void this.#admit(connection);
		this.#listeners.push(await ProvenListener.open({ spot, secret: this.secret, expected, admit, onRefused }));
	}

	/** The sentence with which the rendezvous has failed; null: it has not failed. */
	get failure(): string | null {
		return this.#failure;
	}

	/** The rank whose disconnection made gather() fail; null: no rank has disconnected. */
	get left(): number | null {
		return this.#left;
	}

	get port(): number {
		return this.#listeners[0]!.port;
	}

	/**
	 * Resolves when `ranks`, which are all ranks of the run but this process's own, have joined; from then on no connection is
	 * accepted. Throws a UserError that names the rank with another identity, or the ranks that are absent after `milliseconds`.
	 */
	async gather(ranks: readonly number[], milliseconds: number): Promise<void> {
		const end = performance.now() + milliseconds;
		while (true) {
			if (this.#failure !== null) this.#giveUp(this.#failure);
			// #take accepts each expected rank once and no other, so comparing the counts is enough.
			if (this.#members.size === ranks.length) {
				for (const listener of this.#listeners) listener[Symbol.dispose]();
				return;
			}
			const left = end - performance.now();
			if (left <= 0) {
				const absent = ranks.filter((rank) => !this.#members.has(rank));
				const who = `${absent.length === 1 ? "Rank" : "Ranks"} ${absent.join(", ")} did not join within ${Math.round(milliseconds / 1000)} s.`;
				this.#giveUp(this.#lastRefusal === null ? who : `${who} ${this.#lastRefusal}`);
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

	/** Identities of the ranks that have joined, without this process. */
	get members(): ReadonlyMap<number, Identity> {
		return new Map([...this.#members].map(([rank, { identity }]) => [rank, identity]));
	}

	/**
	 * Requests that a machine's first rank creates that machine's shared memory; resolves with its path and the address that the rank
	 * connects from. Throws a UserError. If any rank has disconnected meanwhile the error names that rank, because its machine may
	 * be the parent in the tree of hosts that this one could not reach.
	 */
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
		await Bun.sleep(newsTime);
		const why = led === null ? "It gave no answer." : led.failed;
		throw new UserError(
			this.#failure ?? `${describeIdentity(identity)} could not make its host's part of the run: ${why}`,
		);
	}

	/** Sends every connected rank the path of the run's shared memory on its machine. */
	welcome(run: string | ((rank: number) => string)): void {
		for (const [rank, { connection }] of this.#members)
			if (connection !== null) send(connection, { run: typeof run === "string" ? run : run(rank) });
	}

	/** Sends every connected rank the sentence with which the rendezvous has failed. */
	refuse(reason: string): void {
		for (const { connection } of this.#members.values()) if (connection !== null) send(connection, { refused: reason });
	}

	/** Closes every connection; a pending gather() fails. */
	[Symbol.dispose](): void {
		this.#fail("The rendezvous was closed.");
		for (const { connection } of this.#members.values()) connection?.[Symbol.dispose]();
		for (const listener of this.#listeners) listener[Symbol.dispose]();
	}

	#giveUp(reason: string): never {
		this.refuse(reason);
		throw new UserError(reason);
	}

	async #admit(connection: ProvenConnection): Promise<void> {
		const introduction = v.safeParse(introductionSchema, await connection.receive(answerTime));
		if (introduction.success) {
			const identity = await this.#identify(introduction.output, connection);
			if (identity !== null) await this.#serve({ identity, connection });
			return;
		}
		send(connection, {
			refused: "The rendezvous does not understand what this rank says it is: it is of another version.",
		});
		connection[Symbol.dispose]();
		this.#lastRefusal = `A process of another version wanted to join from ${connection.from} and was refused.`;
	}

	/** The rank's whole identity. If the rank does not send its configuration, the rendezvous fails and null is returned. */
	async #identify({ digest, ...about }: Introduction, connection: ProvenConnection): Promise<Identity | null> {
		if (digest === this.#digest) return { ...about, configuration: this.reference.configuration };
		send(connection, { tell: "configuration" });
		const end = performance.now() + answerTime;
		while (performance.now() < end && !connection.closed) {
			// Messages about local ranks may come first; they are dropped, since the configurations differ and the rendezvous fails.
			const word = v.safeParse(toldSchema, await connection.receive(end - performance.now()));
			if (word.success) return { ...about, ...word.output };
		}
		const wrong = `${describeIdentity(about)} has another configuration than ${describeIdentity(this.reference)}, and does not tell it.`;
		send(connection, { refused: wrong });
		connection[Symbol.dispose]();
		this.#fail(wrong);
		return null;
	}

	/** Registers a rank, and handles its messages until it disconnects. */
	async #serve(member: Member & { readonly connection: ProvenConnection }): Promise<void> {
		const { identity, connection } = member;
		const wrong = this.#join(member);
		if (wrong !== null) {
			send(connection, { refused: wrong });
			return;
		}
		while (!connection.closed) {
			const word = v.safeParse(memberMessageSchema, await connection.receive(longWait));
			if (!word.success) {
				member.answer?.(null);
				continue;
			}
			if ("trouble" in word.output) {
				if (this.#failure === null) this.#left = word.output.left;
				this.#fail(word.output.trouble);
			} else if ("neighbours" in word.output) {
				for (const about of word.output.neighbours)
					this.#take({ identity: { ...identity, ...about }, connection: null });
			} else {
				if ("failed" in word.output) member.gaveUp = true;
				member.answer?.(word.output);
			}
		}
		member.answer?.(null);
		if (member.gaveUp) return;
		if (this.#failure === null) this.#left = identity.rank!;
		this.#fail(`${describeIdentity(identity)} left before all had joined.`);
	}

	/** Compares a rank's identity with this process's and registers the rank. Returns the difference, which fails the rendezvous, or null. */
	#join(member: Member): string | null {
		const wrong = objection(member.identity, this.reference);
		if (wrong === null) return this.#take(member);
		this.#fail(wrong);
		return wrong;
	}

	/** Registers a rank whose identity is this process's, as compared here or by the first rank of its machine. Returns as #join. */
	#take(member: Member): string | null {
		const { rank } = member.identity;
		const known = this.#members.get(rank ?? -1);
		const expected = rank !== null && rank < this.reference.worldSize && rank !== this.reference.rank;
		if (expected && known === undefined) {
			this.#members.set(rank, member);
			this.#changed?.();
			return null;
		}
		const wrong = expected
			? `${describeIdentity(member.identity)} and ${describeIdentity(known!.identity)} are the same rank.`
			: `${describeIdentity(member.identity)} is not expected by ${describeIdentity(this.reference)}.`;
		this.#fail(wrong);
		return wrong;
	}

	#fail(reason: string): void {
		this.#failure ??= reason;
		this.#changed?.();
	}
}

function send(connection: ProvenConnection, answer: Answer): void {
	connection.send(answer);
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
