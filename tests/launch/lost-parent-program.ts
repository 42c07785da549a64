/**
 * The first rank of a host, which creates its host's shared memory when requested, replies, and is killed then.
 *
 *   bun lost-parent-program.ts {"port", "identity", "options"}      as JSON
 */
import { createHostMemory, type RunOptions } from "../../src/launch/hosts.ts";
import { AuthenticatedConnection } from "../../src/launch/rendezvous/authenticated-connection.ts";
import { LineConnection } from "../../src/launch/rendezvous/line-connection.ts";
import { type HostRequest, type Identity, introductionOf } from "../../src/launch/rendezvous/messages.ts";
import { testLibrary } from "../support.ts";

interface About {
	readonly port: number;
	readonly identity: Identity;
	readonly options: RunOptions;
}

const { port, identity, options } = JSON.parse(process.argv[2]!) as About;
const library = await testLibrary();
const line = await LineConnection.open({ host: options.address, port }, 5000);
const client = (await AuthenticatedConnection.connect(line, options.secret)) as AuthenticatedConnection;
client.send(introductionOf(identity));
const { createHostMemory: request } = (await client.receive(20_000)) as { readonly createHostMemory: HostRequest };
const { run, port: listens } = createHostMemory(
	request,
	{ host: options.address, own: options.address },
	library,
	options,
);
client.send({ run: run.path, port: listens });
// The reply is sent first.
await Bun.sleep(0);
process.kill(process.pid, "SIGKILL");
