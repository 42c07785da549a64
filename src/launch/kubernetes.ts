/**
 * Manifests of a run on Kubernetes, one pod a host: a JobSet (jobset.x-k8s.io/v1alpha2), or an indexed Job with its headless service.
 * Each pod starts the ranks of its host (node.ts); the first pod's name is where they meet. All pods or none are admitted by
 * Kueue, and after a failure all are made anew.
 */
import { exitCodes } from "../system/exit-codes.ts";

export interface PodRun {
	readonly kind: "jobset" | "job";
	readonly name: string;
	/** null: that of the context. */
	readonly namespace: string | null;
	/** Kueue's local queue; null: the scheduler places pods as they come. */
	readonly queue: string | null;
	/** With its digest. */
	readonly image: string;
	/** Arguments of mimo. */
	readonly arguments: readonly string[];
	readonly nodes: number;
	readonly ranksPerNode: number;
	/** GPUs of a pod; 0: none. */
	readonly gpus: number;
	/** Further resources of a pod by name, such as those of RDMA devices. */
	readonly resources: Readonly<Record<string, string>>;
	/** Size of /dev/shm. */
	readonly sharedMemory: string;
	/** Secret whose key `secret` is the run's; null: a run of one pod. */
	readonly secret: string | null;
	/** Secrets whose keys become variables, such as those of an object store. */
	readonly variables: readonly string[];
	/** Claims of volumes and where they are mounted. */
	readonly volumes: readonly { readonly claim: string; readonly path: string }[];
	/** A file that travels along; null: none. */
	readonly file: { readonly name: string; readonly text: string } | null;
	/** Restarts of the whole run. */
	readonly restarts: number;
	/** Seconds between SIGTERM and the end. */
	readonly gracePeriod: number;
}

export const port = 29500;
/** Where the file that travels along is. */
export const fileFolder = "/etc/mimo";
const container = "mimo";
const role = "ranks";

type Json = null | boolean | number | string | readonly Json[] | { readonly [key: string]: Json };
type JsonObject = { readonly [key: string]: Json };

/** The objects, in the order in which they are to be made. */
export function manifestsOf(run: PodRun): JsonObject[] {
	const { name, namespace, file, kind } = run;
	const metadata: JsonObject = { name, ...(namespace !== null && { namespace }) };
	const own: JsonObject[] = [];
	if (file !== null) {
		own.push({ apiVersion: "v1", kind: "ConfigMap", metadata, data: { [file.name]: file.text } });
	}
	if (kind === "job") {
		const spec = {
			clusterIP: "None",
			publishNotReadyAddresses: true,
			selector: { "batch.kubernetes.io/job-name": name },
			ports: [{ name: "rendezvous", port }],
		};
		own.push({ apiVersion: "v1", kind: "Service", metadata, spec });
	}
	return [...own, kind === "job" ? jobOf(run, metadata) : jobSetOf(run, metadata)];
}

function queueLabel({ queue }: PodRun): JsonObject {
	return queue === null ? {} : { labels: { "kueue.x-k8s.io/queue-name": queue } };
}

function jobSetOf(run: PodRun, metadata: JsonObject): JsonObject {
	const { name, restarts } = run;
	const rules = [{ name: "usageError", action: "FailJobSet", onJobFailureReasons: ["PodFailurePolicy"] }];
	return {
		apiVersion: "jobset.x-k8s.io/v1alpha2",
		kind: "JobSet",
		metadata: { ...metadata, ...queueLabel(run) },
		spec: {
			network: { enableDNSHostnames: true, publishNotReadyAddresses: true, subdomain: name },
			failurePolicy: { maxRestarts: restarts, rules },
			successPolicy: { operator: "All" },
			replicatedJobs: [
				{ name: role, replicas: 1, template: { spec: jobSpecOf(run, `${name}-${role}-0-0.${name}`, 0) } },
			],
		},
	};
}

function jobOf(run: PodRun, metadata: JsonObject): JsonObject {
	const { name, restarts, nodes } = run;
	return {
		apiVersion: "batch/v1",
		kind: "Job",
		metadata: { ...metadata, ...queueLabel(run) },
		// A failure ends all pods, and each counts.
		spec: jobSpecOf(run, `${name}-0.${name}`, restarts * nodes, name),
	};
}

/** `subdomain`: the headless service, where no JobSet names it. */
function jobSpecOf(run: PodRun, address: string, backoffLimit: number, subdomain: string | null = null): JsonObject {
	const { nodes, gracePeriod } = run;
	const onExitCodes = { containerName: container, operator: "In", values: [exitCodes.usage] };
	return {
		parallelism: nodes,
		completions: nodes,
		completionMode: "Indexed",
		backoffLimit,
		podReplacementPolicy: "Failed",
		podFailurePolicy: { rules: [{ action: "FailJob", onExitCodes }] },
		template: {
			spec: {
				restartPolicy: "Never",
				...(subdomain !== null && { subdomain }),
				terminationGracePeriodSeconds: gracePeriod,
				containers: [containerOf(run, address)],
				volumes: volumesOf(run),
			},
		},
	};
}

function containerOf(run: PodRun, address: string): JsonObject {
	const { image, arguments: args, nodes, ranksPerNode, gpus, resources, secret, variables, volumes, file } = run;
	const all = { ...(gpus > 0 && { "nvidia.com/gpu": gpus }), ...resources };
	return {
		name: container,
		image,
		args,
		env: [
			{ name: "NNODES", value: String(nodes) },
			{ name: "NPROC_PER_NODE", value: String(ranksPerNode) },
			{ name: "MASTER_ADDR", value: address },
			{ name: "MASTER_PORT", value: String(port) },
			...(secret === null
				? []
				: [{ name: "MIMO_SECRET", valueFrom: { secretKeyRef: { name: secret, key: "secret" } } }]),
		],
		...(variables.length > 0 && { envFrom: variables.map((name) => ({ secretRef: { name } })) }),
		ports: [{ name: "rendezvous", containerPort: port }],
		resources: { limits: all, requests: all },
		// RDMA devices register memory.
		...(Object.keys(resources).length > 0 && { securityContext: { capabilities: { add: ["IPC_LOCK"] } } }),
		volumeMounts: [
			{ name: "shm", mountPath: "/dev/shm" },
			...(file === null ? [] : [{ name: "file", mountPath: fileFolder, readOnly: true }]),
			...volumes.map(({ path }, index) => ({ name: `volume-${index}`, mountPath: path })),
		],
	};
}

function volumesOf({ name, sharedMemory, volumes, file }: PodRun): JsonObject[] {
	return [
		{ name: "shm", emptyDir: { medium: "Memory", sizeLimit: sharedMemory } },
		...(file === null ? [] : [{ name: "file", configMap: { name } }]),
		...volumes.map(({ claim }, index) => ({
			name: `volume-${index}`,
			persistentVolumeClaim: { claimName: claim },
		})),
	];
}
