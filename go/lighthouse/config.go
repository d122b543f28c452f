package lighthouse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/replica"
)

// Config has the settings of a lighthouse. Its fields are the options of the command, and `--help` says what
// they mean (ParseArgs); a comment here says what is different for a caller in Go.
type Config struct {
	Bind string
	// Hostname is the host in the announced address; empty means this machine's name, or localhost if that
	// name does not resolve.
	Hostname string
	quorum.Policy
	// QuorumTick is the interval at which the machine checks the conditions that depend on time alone, such
	// as timeouts.
	QuorumTick time.Duration
	MaxJobs    int
	// MaxCallsPerJob bounds the calls and the members' streams that one job may have open at once, so that a
	// faulty job leaves room for the others. A group has one stream, and two for a moment while it replaces
	// the first.
	MaxCallsPerJob int
	StateDir       string // empty: the last quorum of each job is not kept
	// StateOptional lets the lighthouse start, with a warning, if StateDir cannot be used.
	StateOptional bool
	Cluster       []string // with this lighthouse's address; empty: it is in no cluster
	Advertise     string   // this lighthouse in Cluster; empty: the one with a name of this host
	Recover       bool
	Security      auth.Security // the files with the job's token and certificates
	// AllowRemoteKill lets every client that can connect end groups of this host, if there is no token:
	// managers of other hosts refuse that without one. Without AllowRemoteKill, only clients on this host
	// may. If there is a token, only clients with the token may, and all groups.
	AllowRemoteKill   bool
	MaxConnections    int
	MaxJoinsPerSecond int          // of one address
	Logger            *slog.Logger // nil: slog.Default()
	Network           rpc.Network  // nil: real TCP

	disk disk // zero: the operating system's
}

// DefaultConfig returns the defaults of the command. MinReplicas has no default: only the user knows it.
func DefaultConfig() Config {
	return Config{
		Bind:       "[::]:29510",
		QuorumTick: 100 * time.Millisecond,
		Policy: quorum.Policy{
			// Longer than a step, and half of a Manager's quorum_timeout, which must cover it. A quorum of
			// all healthy groups is formed without this wait.
			JoinTimeout: 30 * time.Second,
			// Fifty heartbeats of 100 ms: longer than a pause of a group's garbage collector.
			HeartbeatTimeout: 5 * time.Second,
			// A live process replaces a broken connection within some 50 ms.
			SuspectGrace: 200 * time.Millisecond,
			// Ten times what is usual: the others would wait for a hanging group until a timeout.
			EjectStalledAfter: quorum.EjectAuto,
		},
		// Several times the number of groups in the largest measured job. A connection costs some 55 kB.
		MaxConnections: 50_000,
		// Twice the rate at which 10,000 groups on one host reconnect within a second.
		MaxJoinsPerSecond: 20_000,
		// A job costs some kB. The bound limits the memory that a faulty client can use.
		MaxJobs: 1000,
		// Half of the connections.
		MaxCallsPerJob: 25_000,
	}
}

// Validate returns an error that names the first invalid setting, its value, and the allowed values. New also
// checks that this lighthouse is in Cluster, which may need the network.
func (c Config) Validate() error {
	if err := rpc.ValidateBind("bind", c.Bind); err != nil {
		return err
	}
	if c.Hostname != "" {
		if err := rpc.ValidateHostname("hostname", c.Hostname); err != nil {
			return err
		}
	}
	if err := c.Policy.Validate(); err != nil {
		return err
	}
	if c.QuorumTick <= 0 {
		return fmt.Errorf("quorum_tick_ms is %g: it must be more than 0",
			float64(c.QuorumTick)/float64(time.Millisecond))
	}
	if err := c.validateCluster(); err != nil {
		return err
	}
	for _, limit := range []struct {
		name  string
		value int
	}{{"max_jobs", c.MaxJobs}, {"max_calls_per_job", c.MaxCallsPerJob}, {"max_connections", c.MaxConnections},
		{"max_joins_per_second", c.MaxJoinsPerSecond}} {
		if limit.value < 1 {
			return fmt.Errorf("%s is %d: it must be at least 1", limit.name, limit.value)
		}
	}
	return c.Security.Validate()
}

// validateCluster returns an error if the settings of a cluster do not fit together.
func (c Config) validateCluster() error {
	switch {
	case len(c.Cluster) > 0 && c.StateDir == "":
		return errors.New(`state_dir is "": a lighthouse of a cluster needs a directory`)
	case len(c.Cluster) == 0 && c.Advertise != "":
		return fmt.Errorf("advertise is %q: it names this lighthouse among those of cluster, which is not "+
			"given", c.Advertise)
	case len(c.Cluster) == 0 && c.Recover:
		return errors.New("recover is set: it needs cluster, with this lighthouse in it")
	}
	return nil
}

// findSelf sets Advertise to the lighthouse of Cluster that this one is. Without an Advertise it resolves the
// names in Cluster.
func (c *Config) findSelf() (err error) {
	if len(c.Cluster) == 0 {
		return nil
	}
	c.Advertise, err = replica.Self(c.Cluster, c.Advertise, c.Bind, func(host string) bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		return rpc.IsThisHost(ctx, host)
	})
	if err != nil {
		return err
	}
	address, err := rpc.ParseAddress("cluster", c.Advertise)
	if err == nil && address.TLS != c.Security.ServesTLS() {
		err = fmt.Errorf("cluster has the address %s: it must begin with https:// if tls_cert is set, and "+
			"with http:// otherwise", c.Advertise)
	}
	return err
}

func (c Config) withDefaults() Config {
	if c.Hostname == "" {
		c.Hostname = ownHostname()
	}
	c.Logger, c.Network = cmp.Or(c.Logger, slog.Default()), cmp.Or(c.Network, rpc.TCP)
	if c.disk.read == nil {
		c.disk = disk{readStates, writeFile}
	}
	return c
}

// machineName returns this machine's name, empty if it has none.
func machineName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// ownHostname returns this machine's name if it resolves, and localhost otherwise: other hosts could not use
// a name that does not resolve.
func ownHostname() string {
	name := machineName()
	if name == "" {
		return "localhost"
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := net.DefaultResolver.LookupHost(ctx, name); err != nil {
		return "localhost"
	}
	return name
}
