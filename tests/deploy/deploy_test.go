// Package deploy checks what is in deploy/ and tests/e2e: it builds the kustomizations, renders the chart, and decodes every
// object strictly into Kubernetes' own types, so that a field that does not exist, or stands in the wrong place, shows.
package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	goyaml "go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	kubeconfig "k8s.io/client-go/tools/clientcmd/api/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	kind "sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	root  = "../.."
	chart = root + "/deploy/helm/ipvs-proxy"
)

// What a set of manifests says.
type manifests struct {
	daemonSet *apps.DaemonSet
	role      *rbac.ClusterRole
	binding   *rbac.ClusterRoleBinding
	account   *core.ServiceAccount
	configMap *core.ConfigMap
}

// Decodes a stream of manifests, every field known and every kind expected.
func decode(t *testing.T, stream []byte) manifests {
	t.Helper()
	var m manifests
	documents := goyaml.NewDecoder(bytes.NewReader(stream))
	for {
		var document map[string]any
		if err := documents.Decode(&document); errors.Is(err, io.EOF) {
			return m
		} else if err != nil {
			t.Fatalf("not YAML: %v", err)
		}
		if document == nil {
			continue
		}
		text, err := yaml.Marshal(document)
		if err != nil {
			t.Fatal(err)
		}
		var object any
		switch document["kind"] {
		case "DaemonSet":
			m.daemonSet = new(apps.DaemonSet)
			object = m.daemonSet
		case "ClusterRole":
			m.role = new(rbac.ClusterRole)
			object = m.role
		case "ClusterRoleBinding":
			m.binding = new(rbac.ClusterRoleBinding)
			object = m.binding
		case "ServiceAccount":
			m.account = new(core.ServiceAccount)
			object = m.account
		case "ConfigMap":
			m.configMap = new(core.ConfigMap)
			object = m.configMap
		default:
			t.Fatalf("an object of kind %v", document["kind"])
		}
		if err := yaml.UnmarshalStrict(text, object); err != nil {
			t.Errorf("%v: %v", document["kind"], err)
		}
	}
}

func kustomize(t *testing.T, folder string) manifests {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(root, folder))
	if err != nil {
		t.Fatal(err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, text)
}

func helm(values map[string]any) ([]byte, error) {
	loaded, err := loader.Load(chart)
	if err != nil {
		return nil, err
	}
	release := chartutil.ReleaseOptions{Name: "ipvs-proxy", Namespace: "kube-system"}
	all, err := chartutil.ToRenderValues(loaded, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(loaded, all)
	if err != nil {
		return nil, err
	}
	var stream strings.Builder
	for name, text := range rendered {
		fmt.Fprintf(&stream, "---\n# %s\n%s\n", name, text)
	}
	return []byte(stream.String()), nil
}

func rendered(t *testing.T, values map[string]any) manifests {
	t.Helper()
	stream, err := helm(values)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, stream)
}

// The ways say the same to the node, but for where the ConfigMap is.
func TestAllWaysAreOneDaemon(t *testing.T) {
	plain := kustomize(t, "deploy/kubernetes")
	ways := map[string]manifests{
		"kubeadm": kustomize(t, "deploy/kubeadm"),
		"e2e":     kustomize(t, "tests/e2e/deploy"),
		"helm":    rendered(t, map[string]any{"apiServer": "https://192.0.2.1:6443"}),
	}
	pod := func(m manifests) core.PodSpec {
		spec := m.daemonSet.Spec.Template.Spec.DeepCopy()
		for i := range spec.Volumes {
			if spec.Volumes[i].ConfigMap != nil {
				spec.Volumes[i].ConfigMap.Name = ""
			}
		}
		// The tests have a scheduler of their own.
		for _, container := range append(spec.InitContainers, spec.Containers...) {
			for i, arg := range container.Args {
				container.Args[i] = strings.Replace(arg, "--scheduler=rr", "--scheduler=lc", 1)
			}
		}
		return *spec
	}
	for name, way := range ways {
		if a, b := pod(plain), pod(way); !reflect.DeepEqual(a, b) {
			first, _ := yaml.Marshal(a)
			second, _ := yaml.Marshal(b)
			t.Errorf("%s has another pod than deploy/kubernetes:\n%s\n---\n%s", name, first, second)
		}
		if !reflect.DeepEqual(plain.role.Rules, way.role.Rules) {
			t.Errorf("%s has another role", name)
		}
		if !reflect.DeepEqual(plain.daemonSet.Spec.UpdateStrategy, way.daemonSet.Spec.UpdateStrategy) {
			t.Errorf("%s has another way to update", name)
		}
	}
}

// Names that must agree do, and the daemon has no more privilege than it needs.
func TestPod(t *testing.T) {
	for name, m := range map[string]manifests{
		"deploy/kubernetes": kustomize(t, "deploy/kubernetes"),
		"helm":              rendered(t, map[string]any{"apiServer": "https://192.0.2.1:6443"}),
	} {
		pod := m.daemonSet.Spec.Template.Spec
		subject := m.binding.Subjects[0]
		if pod.ServiceAccountName != m.account.Name || subject.Name != m.account.Name ||
			subject.Namespace != m.account.Namespace || m.daemonSet.Namespace != m.account.Namespace ||
			m.binding.RoleRef.Name != m.role.Name {
			t.Errorf("%s: account, role and pod do not belong together", name)
		}
		var mounted bool
		for _, volume := range pod.Volumes {
			mounted = mounted || volume.ConfigMap != nil && volume.ConfigMap.Name == m.configMap.Name
		}
		if !mounted || m.configMap.Namespace != m.daemonSet.Namespace {
			t.Errorf("%s: the pod does not mount the ConfigMap %s/%s", name, m.configMap.Namespace, m.configMap.Name)
		}
		labels := m.daemonSet.Spec.Template.Labels
		for key, value := range m.daemonSet.Spec.Selector.MatchLabels {
			if labels[key] != value {
				t.Errorf("%s: the selector's label %s is not the pod's", name, key)
			}
		}
		for _, container := range append(pod.InitContainers, pod.Containers...) {
			for _, mount := range container.VolumeMounts {
				found := false
				for _, volume := range pod.Volumes {
					found = found || volume.Name == mount.Name
				}
				if !found {
					t.Errorf("%s: container %s mounts %s, which is no volume", name, container.Name, mount.Name)
				}
			}
		}
		security := pod.Containers[0].SecurityContext
		wanted := core.Capabilities{Drop: []core.Capability{"ALL"}, Add: []core.Capability{"NET_ADMIN", "NET_RAW"}}
		if security.Privileged != nil || !reflect.DeepEqual(*security.Capabilities, wanted) ||
			*security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem {
			t.Errorf("%s: the daemon's privileges are %+v", name, security)
		}
		if probe := pod.Containers[0].LivenessProbe.HTTPGet.Path; probe != "/livez" {
			t.Errorf("%s: the pod is killed by %s", name, probe)
		}
	}
}

// What the ConfigMaps hold is what kube-proxy and its client read.
func TestConfigurations(t *testing.T) {
	more := map[string]any{
		"apiServer":   "https://192.0.2.1:6443",
		"clusterCIDR": "10.244.0.0/16",
		"config":      map[string]any{"ipvs": map[string]any{"strictARP": true}},
	}
	for name, m := range map[string]manifests{
		"deploy/kubernetes": kustomize(t, "deploy/kubernetes"),
		"tests/e2e":         kustomize(t, "tests/e2e/deploy"),
		"helm":              rendered(t, more),
	} {
		var configuration proxyconfig.KubeProxyConfiguration
		if err := yaml.UnmarshalStrict([]byte(m.configMap.Data["config.conf"]), &configuration); err != nil {
			t.Errorf("%s: config.conf: %v", name, err)
		}
		if configuration.Mode != "ipvs" {
			t.Errorf("%s: config.conf: mode is %q", name, configuration.Mode)
		}
		if name == "helm" && (configuration.ClusterCIDR != "10.244.0.0/16" || !configuration.IPVS.StrictARP) {
			t.Errorf("helm: config.conf lacks values: %+v", configuration)
		}
		var access kubeconfig.Config
		if err := yaml.UnmarshalStrict([]byte(m.configMap.Data["kubeconfig.conf"]), &access); err != nil {
			t.Errorf("%s: kubeconfig.conf: %v", name, err)
		} else if !strings.HasPrefix(access.Clusters[0].Cluster.Server, "https://") {
			t.Errorf("%s: kubeconfig.conf: the server is %q", name, access.Clusters[0].Cluster.Server)
		}
	}
}

func TestChart(t *testing.T) {
	for _, message := range lint.All(chart, map[string]any{"apiServer": "https://192.0.2.1:6443"}, "kube-system", true).Messages {
		// A chart needs no icon.
		if !strings.Contains(message.Error(), "icon is recommended") {
			t.Error(message.Error())
		}
	}
	for _, server := range []any{"", "192.0.2.1:6443", nil} {
		_, err := helm(map[string]any{"apiServer": server})
		if err == nil || !strings.Contains(err.Error(), "apiServer") || !strings.Contains(err.Error(), "existingConfigMap") {
			t.Errorf("apiServer %v: the error is %v", server, err)
		}
	}
	m := rendered(t, map[string]any{"existingConfigMap": "kube-proxy", "extraArgs": []any{"--drain-timeout=10m"}})
	if m.configMap != nil {
		t.Error("with an existing ConfigMap there is another one")
	}
	pod := m.daemonSet.Spec.Template.Spec
	for _, container := range append(pod.InitContainers, pod.Containers...) {
		if last := container.Args[len(container.Args)-1]; last != "--drain-timeout=10m" {
			t.Errorf("the last argument of %s is %s", container.Name, last)
		}
	}
	// The probes ask where the configuration says.
	for address, port := range map[string]int32{"": 10256, "0.0.0.0:10300": 10300, "[::]:10301": 10301, "0.0.0.0": 10256} {
		values := map[string]any{"apiServer": "https://192.0.2.1:6443", "config": map[string]any{"healthzBindAddress": address}}
		if got := rendered(t, values).daemonSet.Spec.Template.Spec.Containers[0].Ports[0].ContainerPort; got != port {
			t.Errorf("healthzBindAddress %q: the probes' port is %d", address, got)
		}
	}
	for name, value := range map[string]any{"clusterCidr": "10.0.0.0/8", "scheduler": 5, "healthzPort": 0} {
		_, err := helm(map[string]any{"apiServer": "https://192.0.2.1:6443", name: value})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s %v: the error is %v", name, value, err)
		}
	}
}

// As kind itself reads it; what it takes for kubeProxyMode is in its internal package config.
func TestKindCluster(t *testing.T) {
	text, err := os.ReadFile(root + "/tests/e2e/kind.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cluster kind.Cluster
	decoder := goyaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&cluster); err != nil {
		t.Fatal(err)
	}
	if cluster.APIVersion != "kind.x-k8s.io/v1alpha4" || cluster.Kind != "Cluster" || cluster.Networking.KubeProxyMode != "none" {
		t.Errorf("kind reads it as %+v", cluster)
	}
	// The kubeconfig names the control plane's node.
	data := kustomize(t, "tests/e2e/deploy").configMap.Data
	if !strings.Contains(data["kubeconfig.conf"], "//"+cluster.Name+"-control-plane:6443") {
		t.Errorf("kubeconfig.conf does not name %s-control-plane", cluster.Name)
	}
	if !strings.Contains(data["config.conf"], cluster.Networking.PodSubnet) {
		t.Errorf("config.conf does not name %s", cluster.Networking.PodSubnet)
	}
}
