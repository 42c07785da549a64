/**
 * Manifests of a run on Kubernetes, one pod a host: a JobSet (jobset.x-k8s.io/v1alpha2), a TrainJob of Kubeflow with its runtime, of
 * which its Trainer makes a JobSet (trainer.kubeflow.org/v1alpha1), or an indexed Job with its headless service.
 * Each pod starts the ranks of its host (node.ts); the first pod's name is where they meet. All pods or none are admitted by
 * Kueue, and after a failure all are made anew.
 */
import { exitCodes } from "../system/exit-codes.ts";

export const podRunKinds = ["jobset", "trainjob", "job"] as const;
export type PodRunKind = (typeof podRunKinds)[number];

export interface PodRun {
	readonly kind: PodRunKind;
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
/** Names of the container and of a JobSet's job; Kubeflow's Trainer looks for its own. */
const namesOf = (kind: PodRunKind) =>
	kind === "trainjob" ? { container: "node", role: "node" } : { container: "mimo", role: "ranks" };
const trainer = "trainer.kubeflow.org";

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
	if (kind === "job") return [...own, jobOf(run, metadata)];
	if (kind === "trainjob") return [...own, ...trainJobOf(run, metadata)];
	const labelled = { ...metadata, ...queueLabel(run) };
	return [...own, { apiVersion: "jobset.x-k8s.io/v1alpha2", kind: "JobSet", metadata: labelled, spec: jobSetOf(run) }];
}

function queueLabel({ queue }: PodRun): JsonObject {
	return queue === null ? {} : { labels: { "kueue.x-k8s.io/queue-name": queue } };
}

/** The specification of a JobSet. */
function jobSetOf(run: PodRun): JsonObject {
	const { name, restarts, kind } = run;
	const { role } = namesOf(kind);
	const rules = [{ name: "usageError", action: "FailJobSet", onJobFailureReasons: ["PodFailurePolicy"] }];
	const label =
		kind === "trainjob" ? { metadata: { labels: { [`${trainer}/trainjob-ancestor-step`]: "trainer" } } } : {};
	return {
		network: { enableDNSHostnames: true, publishNotReadyAddresses: true, subdomain: name },
		failurePolicy: { maxRestarts: restarts, rules },
		successPolicy: { operator: "All" },
		replicatedJobs: [
			{ name: role, replicas: 1, template: { ...label, spec: jobSpecOf(run, `${name}-${role}-0-0.${name}`, 0) } },
		],
	};
}

/** The run's own runtime, whose JobSet gets the TrainJob's name, and the TrainJob. */
function trainJobOf(run: PodRun, metadata: JsonObject): JsonObject[] {
	const { name, nodes } = run;
	const apiVersion = `${trainer}/v1alpha1`;
	const runtimeSpec = { mlPolicy: { numNodes: nodes }, template: { spec: jobSetOf(run) } };
	const spec = { runtimeRef: { apiGroup: trainer, kind: "TrainingRuntime", name }, trainer: { numNodes: nodes } };
	return [
		{ apiVersion, kind: "TrainingRuntime", metadata, spec: runtimeSpec },
		{ apiVersion, kind: "TrainJob", metadata: { ...metadata, ...queueLabel(run) }, spec },
	];
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
	const { nodes, gracePeriod, kind } = run;
	const onExitCodes = { containerName: namesOf(kind).container, operator: "In", values: [exitCodes.usage] };
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
		name: namesOf(run.kind).container,
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
