/**
 * A listening socket that passes on the connections whose other side has proved that it knows the run's secret. Any process may
 * connect: the number of unproven connections, the length of their lines and the time they have are bounded.
 */
import type { Server } from "node:net";
import { type LineConnection, listen, type Spot } from "./line-connection.ts";
import { ProvenConnection } from "./proven-connection.ts";

export interface ProvenListenerOptions {
	readonly spot: Spot;
	/** null: no secret; processes of this user on this host are accepted. */
	readonly secret: string | null;
	/** Processes of the run that may connect at once; `placesForUnproven` more unproven connections are held. */
	readonly expected: number;
	readonly admit: (connection: ProvenConnection) => void;
	/** Called with a sentence about a connection that was refused. */
	readonly onRefused?: (sentence: string) => void;
}

const placesForUnproven = 64;

export class ProvenListener implements Disposable {
	/** Connections that have not proved themselves, the oldest first. */
	readonly #unproven = new Set<LineConnection>();
	#server: Server | null = null;
	#port = 0;

	private constructor(private readonly options: ProvenListenerOptions) {}

	/** Rejects with the system's error. */
	static async open(options: ProvenListenerOptions): Promise<ProvenListener> {
		const listener = new ProvenListener(options);
		const opened = await listen(options.spot, (connection) => void listener.#meet(connection));
		listener.#server = opened.server;
		listener.#port = opened.port;
		return listener;
	}

	get port(): number {
		return this.#port;
	}

	/** Stops listening and drops the unproven connections; admitted connections stay open. */
	[Symbol.dispose](): void {
		this.#server?.close();
		this.#server?.unref();
		this.#server = null;
		for (const connection of this.#unproven) connection.drop();
	}

	async #meet(connection: LineConnection): Promise<void> {
		if (this.#unproven.size >= placesForUnproven + this.options.expected) this.#dropOldest();
		this.#unproven.add(connection);
		// A refused connection keeps its place until it is closed, so that reconnecting at once gains nothing.
		void connection.ended().then(() => this.#unproven.delete(connection));
		const outcome = await ProvenConnection.welcome(connection, this.options.secret);
		if (typeof outcome === "string") {
			connection[Symbol.dispose]();
			this.options.onRefused?.(`A process at ${connection.from} ${outcome} and was refused.`);
			return;
		}
		this.#unproven.delete(connection);
		if (this.#server === null) outcome[Symbol.dispose]();
		else this.options.admit(outcome);
	}

	/** Drops the oldest unproven connection, which has had the most time to prove the secret. */
	#dropOldest(): void {
		const [oldest] = this.#unproven;
		this.#unproven.delete(oldest!);
		oldest!.drop();
	}
}
