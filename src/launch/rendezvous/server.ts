/**
 * Ranks of a run find each other over TCP, on connections whose sides have proved that they know the run's secret
 * (proven-connection.ts). A rank describes itself, and the host (our launcher, or rank 0) compares the description with
 * its own; it asks for the whole configuration only where the digests differ, to say in which keys. Where there are several
 * machines the first rank of each speaks for its neighbours too (local-ranks.ts). When all ranks are there the host tells them
 * where the shared memory of the run is. On every other machine the first rank is asked to make that first.
 *
 *     rank → host   INTRODUCTION
 *     host → rank   TELL                    where the digests differ
 *     rank → host   CONFIGURATION           then
 *     rank → host   NEIGHBOURS or TROUBLE   by the first rank of a machine, as they come
 *     host → rank   LEAD                    to the first rank of another machine
 *     rank → host   LED or FAILED           by that
 *     host → rank   WELCOME or REFUSAL
 *
 * Strangers are turned away and harm no rank; a rank of the run that does not fit ends it for all.
 */
import * as v from "valibot";
import { UserError } from "../../native/errors.ts";
import { Reception } from "./admission.ts";
import {
	describeIdentity,
	digestOf,
	type Identity,
	type Introduction,
	introductionSchema,
	objection,
} from "./identity.ts";
import type { Spot } from "./line-connection.ts";
import { type Answer, type Lead, type Led, type Part, toldSchema, wordSchema } from "./messages.ts";
import { answerTime, type ProvenConnection } from "./proven-connection.ts";

/** Milliseconds in which a machine has made its part of the run and met rank 0's. */
const leadTime = 30_000;
/** Milliseconds in which the host learns that a rank has left, once another rank has failed because of it. */
const newsTime = 200;
/** Until the other side says something or leaves. */
const longWait = 2 ** 31 - 1;

interface Member {
	readonly identity: Identity;
	/** null: another rank speaks for this one. */
	readonly connection: ProvenConnection | null;
	/** Takes its answer to a request. */
	answer?: ((led: Led | null) => void) | undefined;
	/** The rank has told why it cannot go on, so that its leaving needs no further report. */
	gaveUp?: boolean;
}

export class RendezvousHost implements Disposable {
	readonly #members = new Map<number, Member>();
	#strangers: string | null = null;
	#failure: string | null = null;
	#left: number | null = null;
	#changed: (() => void) | null = null;
	readonly #receptions: Reception[] = [];
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
			// No rank comes twice, and only these ranks come: their number is enough.
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

	/**
	 * Asks a rank to make its host's part of the run; resolves with this part and the address that it came from. Throws a UserError.
	 * Where a rank has left in the meantime the error names that rank: its host may be the parent that the asked host needs.
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
		this.#strangers = `A process of another version wanted to join from ${connection.from} and was refused.`;
	}

	/** The rank's whole identity; null, and the meeting has failed, where it does not tell its configuration. */
	async #identify({ digest, ...about }: Introduction, connection: ProvenConnection): Promise<Identity | null> {
		if (digest === this.#digest) return { ...about, configuration: this.reference.configuration };
		send(connection, { tell: "configuration" });
		const end = performance.now() + answerTime;
		while (performance.now() < end && !connection.closed) {
			// Words about neighbours may come before: the meeting fails in any case.
			const word = v.safeParse(toldSchema, await connection.receive(end - performance.now()));
			if (word.success) return { ...about, ...word.output };
		}
		const wrong = `${describeIdentity(about)} has another configuration than ${describeIdentity(this.reference)}, and does not tell it.`;
		send(connection, { refused: wrong });
		connection[Symbol.dispose]();
		this.#fail(wrong);
		return null;
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

	/** Returns why the rank does not fit, which ends the meeting for all. */
	#join(member: Member): string | null {
		const wrong = objection(member.identity, this.reference);
		if (wrong === null) return this.#take(member);
		this.#fail(wrong);
		return wrong;
	}

	/** Of a rank that is like this one, also because one that is has found it so. */
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
