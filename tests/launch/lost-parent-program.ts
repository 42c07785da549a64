/**
 * The first rank of a host: asked to, it makes its host's part of the run and tells it, and is killed then.
 *
 *   bun lost-parent-program.ts {"port", "identity", "options"}      as JSON
 */
import { leadHost, type RunOptions } from "../../src/launch/hosts.ts";
import { type Identity, introductionOf } from "../../src/launch/rendezvous/identity.ts";
import { LineConnection } from "../../src/launch/rendezvous/line-connection.ts";
import type { Lead } from "../../src/launch/rendezvous/messages.ts";
import { ProvenConnection } from "../../src/launch/rendezvous/proven-connection.ts";
import { testLibrary } from "../support.ts";

interface About {
	readonly port: number;
	readonly identity: Identity;
	readonly options: RunOptions;
}

const { port, identity, options } = JSON.parse(process.argv[2]!) as About;
const library = await testLibrary();
const lines = await LineConnection.open({ host: options.address, port }, 5000);
const guest = (await ProvenConnection.introduce(lines, options.secret)) as ProvenConnection;
guest.send(introductionOf(identity));
const { lead } = (await guest.receive(20_000)) as { readonly lead: Lead };
const { run, port: listens } = leadHost(lead, { host: options.address, own: options.address }, library, options);
guest.send({ run: run.path, port: listens });
// The word leaves first.
await Bun.sleep(0);
process.kill(process.pid, "SIGKILL");
