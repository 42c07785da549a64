/**
 * A listening socket that passes on authenticated connections. Any process may connect: the number of unauthenticated
 * connections, the length of their lines and their time to authenticate are bounded.
 */
import type { Server } from "node:net";
import { AuthenticatedConnection } from "./authenticated-connection.ts";
import { type Endpoint, type LineConnection, listen } from "./line-connection.ts";

export interface AuthenticatedListenerOptions {
	readonly endpoint: Endpoint;
	/** null: no secret; processes of this user on this host are accepted. */
	readonly secret: string | null;
	/** Processes of the run that may connect at once; `placesForUnproven` more unproven connections are held. */
	readonly expected: number;
	readonly admit: (connection: AuthenticatedConnection) => void;
	/** Called with a sentence about a connection that was refused. */
	readonly onRefused?: (sentence: string) => void;
}

const placesForUnauthenticated = 64;

export class AuthenticatedListener implements Disposable {
	/** Unauthenticated connections, the oldest first. */
	readonly #unauthenticated = new Set<LineConnection>();
	#server: Server | null = null;
	#port = 0;

	private constructor(private readonly options: AuthenticatedListenerOptions) {}

	/** Rejects with the system's error. */
	static async open(options: AuthenticatedListenerOptions): Promise<AuthenticatedListener> {
		const listener = new AuthenticatedListener(options);
		const opened = await listen(options.endpoint, (connection) => void listener.#authenticate(connection));
		listener.#server = opened.server;
		listener.#port = opened.port;
		return listener;
	}

	get port(): number {
		return this.#port;
	}

	/** Stops listening and drops the unauthenticated connections; admitted connections stay open. */
	[Symbol.dispose](): void {
		this.#server?.close();
		this.#server?.unref();
		this.#server = null;
		for (const connection of this.#unauthenticated) connection.drop();
	}

	async #authenticate(connection: LineConnection): Promise<void> {
		if (this.#unauthenticated.size >= placesForUnauthenticated + this.options.expected) this.#dropOldest();
		this.#unauthenticated.add(connection);
		// A refused connection keeps its place until it is closed, so that reconnecting at once gains nothing.
		void connection.ended().then(() => this.#unauthenticated.delete(connection));
		const outcome = await AuthenticatedConnection.accept(connection, this.options.secret);
		if (typeof outcome === "string") {
			connection[Symbol.dispose]();
			this.options.onRefused?.(`A process at ${connection.from} ${outcome} and was refused.`);
			return;
		}
		this.#unauthenticated.delete(connection);
		if (this.#server === null) outcome[Symbol.dispose]();
		else this.options.admit(outcome);
	}

	/** Drops the oldest unauthenticated connection, which has had the most time to prove the secret. */
	#dropOldest(): void {
		const [oldest] = this.#unauthenticated;
		this.#unauthenticated.delete(oldest!);
		oldest!.drop();
	}
}
