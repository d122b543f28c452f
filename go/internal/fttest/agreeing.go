package fttest

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/lighthouse"
)

// AgreeingHosts are the hosts of the lighthouses of an Agreeing cluster, and AgreeingAddrs their addresses.
var (
	AgreeingHosts = []string{"one", "three", "two"}
	AgreeingAddrs = "http://one:29510,http://three:29510,http://two:29510"
)

// Agreeing is a Cluster with three lighthouses that agree by Raft. Its field Lighthouse is nil.
type Agreeing struct {
	Cluster
	dirs    map[string]string // of the lighthouses that run or were killed, by host
	running map[string]*lighthouse.Server
	min     int
	set     []func(*lighthouse.Config)
}

// NewAgreeing starts three lighthouses, and returns when one leads. They are shut down at the end of the
// test. set changes their settings.
func NewAgreeing(t *testing.T, minReplicas int, set ...func(*lighthouse.Config)) *Agreeing {
	a := &Agreeing{Cluster: Cluster{T: t, Net: NewNetwork(), Log: &Log{}}, dirs: map[string]string{},
		running: map[string]*lighthouse.Server{}, min: minReplicas, set: set}
	for _, host := range AgreeingHosts {
		a.Start(host)
	}
	t.Cleanup(func() {
		for _, server := range a.running {
			server.Shutdown()
		}
	})
	a.Leader()
	return a
}

// Start starts the lighthouse on a host, with the directory that it had before.
func (a *Agreeing) Start(host string) { a.StartAs(host, AgreeingAddrs) }

// StartAs starts a lighthouse on a host with a value of --cluster.
func (a *Agreeing) StartAs(host, cluster string) {
	if a.dirs[host] == "" {
		a.dirs[host] = a.T.TempDir()
	}
	a.running[host] = a.LighthouseOn(host, a.min, func(cfg *lighthouse.Config) {
		cfg.Cluster = strings.Split(cluster, ",")
		cfg.Advertise = "http://" + host + ":29510"
		cfg.StateDir = a.dirs[host]
		for _, set := range a.set {
			set(cfg)
		}
	})
}

// Server returns the lighthouse that runs on a host.
func (a *Agreeing) Server(host string) *lighthouse.Server { return a.running[host] }

// Running returns the hosts whose lighthouses run.
func (a *Agreeing) Running() []string { return slices.Sorted(maps.Keys(a.running)) }

// Kill ends the lighthouse on a host as SIGKILL does: its connections break, and it tells nobody.
func (a *Agreeing) Kill(host string) {
	a.Net.Host(host).Kill()
	a.running[host].Shutdown()
	delete(a.running, host)
}

// Leader waits until a lighthouse leads, and returns its host.
func (a *Agreeing) Leader() string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		for host, server := range a.running {
			if server.Leads(ctx) {
				return host
			}
		}
		select {
		case <-ctx.Done():
			require.Fail(a.T, "no lighthouse leads after a minute")
		case <-time.After(10 * time.Millisecond):
		}
	}
}
