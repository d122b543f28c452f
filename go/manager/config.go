package manager

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"time"
	"unicode/utf8"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/round"
)

// ServerConfig has the settings of a manager server.
type ServerConfig struct {
	// ReplicaID is unique to this incarnation of the replica group: a restarted group is a new member.
	ReplicaID string
	// LighthouseAddr is http://host:port of the lighthouse, or the addresses of the lighthouses of a cluster,
	// separated by commas. They must all begin with http://, or all with https://.
	LighthouseAddr string
	// Job is the id of the job. If it is empty, TORCHFT_JOB_ID of the environment is used, and without that
	// the default job.
	Job string
	// Hostname is the host in the announced address.
	Hostname string
	// Bind is host:port to listen on. Port 0 takes a free one.
	Bind string
	// StoreAddr is host:port of the group's TCPStore.
	StoreAddr string
	// WorldSize is the number of ranks in the group.
	WorldSize int64
	// HeartbeatInterval is the time between heartbeat calls to an upstream lighthouse. Other lighthouses set
	// the interval of their streams.
	HeartbeatInterval time.Duration
	// ConnectTimeout bounds the first connection to the lighthouse.
	ConnectTimeout time.Duration
	// QuorumRetries is how often a quorum request that the lighthouse refused is repeated. While the
	// lighthouse cannot be reached, requests are repeated until the deadline in any case.
	QuorumRetries int64
	// Security names the files with the job's token and certificates, for this server and for its calls to
	// the lighthouse.
	Security auth.Security
	// Exit ends the process when a kill is requested; os.Exit if nil.
	Exit func(code int)
	// Logger is slog.Default() if nil.
	Logger *slog.Logger
	// Network is real TCP if nil.
	Network rpc.Network
	// Membership is that of the group at the lighthouse (lighthouses.Join), which the caller joins after
	// Validate. NewServer takes it over, and closes it.
	Membership membership.Membership
}

// Validate returns an error that names the first invalid setting, its value, and the allowed values. The
// addresses of lighthouses are read by lighthouses.Join.
func (c ServerConfig) Validate() error {
	for _, text := range []struct{ name, value string }{{"replica_id", c.ReplicaID},
		{"store_addr", c.StoreAddr}} {
		if !utf8.ValidString(text.value) {
			return fmt.Errorf("%s is %q: it must be valid UTF-8", text.name, text.value)
		}
	}
	if c.ReplicaID == "" {
		return fmt.Errorf(`replica_id is "": it must be a name that no other replica group has`)
	}
	if len(c.ReplicaID) > rpc.MaxReplicaID {
		return fmt.Errorf("replica_id has %d bytes: allowed are %d", len(c.ReplicaID), rpc.MaxReplicaID)
	}
	if err := rpc.ValidateJob("job id ("+rpc.JobEnv+")", c.job()); err != nil {
		return err
	}
	if err := rpc.ValidateHostname("hostname", c.Hostname); err != nil {
		return err
	}
	if err := rpc.ValidateBind("bind", c.Bind); err != nil {
		return err
	}
	if err := (round.Group{ReplicaID: c.ReplicaID, WorldSize: c.WorldSize}).Validate(); err != nil {
		return err
	}
	if c.HeartbeatInterval <= 0 {
		return fmt.Errorf("heartbeat_interval is %s: it must be more than 0", c.HeartbeatInterval)
	}
	if c.ConnectTimeout <= 0 {
		return fmt.Errorf("connect_timeout is %s: it must be more than 0", c.ConnectTimeout)
	}
	if c.QuorumRetries < 0 {
		return fmt.Errorf("quorum_retries is %d: it must be at least 0", c.QuorumRetries)
	}
	return c.Security.Validate()
}

func (c ServerConfig) job() string { return cmp.Or(c.Job, os.Getenv(rpc.JobEnv), rpc.DefaultJob) }

func (c ServerConfig) withDefaults() ServerConfig {
	if c.Exit == nil {
		c.Exit = os.Exit
	}
	c.Logger, c.Network = cmp.Or(c.Logger, slog.Default()), cmp.Or(c.Network, rpc.TCP)
	return c
}
