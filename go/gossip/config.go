package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/internal/auth"
)

// Config has the settings of a node.
type Config struct {
	Name string `json:"name"` // of the member, unique in the job
	// grows with each start under the name; raised if a later incarnation is known (agree.Rise)
	Incarnation int64 `json:"incarnation"`
	// StoreAddress is announced to the other members.
	StoreAddress string `json:"store_address"`
	// Host is the announced name or IP address.
	Host string `json:"host"`
	// Port is bound for TCP and UDP; 0 takes a free one.
	Port int `json:"port"`
	// Seeds are the "host:port" of the members that start the job. This member may be one of them. Without
	// seeds, it starts the job alone.
	Seeds []string `json:"seeds"`
	// MinMembers is the smallest size of a view.
	MinMembers int `json:"min_members"`

	Job            string        `json:"-"`
	Security       auth.Security `json:"-"`
	ConnectTimeout time.Duration `json:"-"` // for reaching one of the seeds
	Log            *slog.Logger  `json:"-"`
}

// Validate returns an error that names the first setting that is not allowed.
func (c Config) Validate() error {
	switch {
	case c.Port < 0 || c.Port > math.MaxUint16:
		return fmt.Errorf("port=%d is not allowed; allowed: 0 to 65535", c.Port)
	case c.MinMembers < 1:
		return fmt.Errorf("min_members=%d is not allowed; allowed: 1 and more", c.MinMembers)
	case len(c.Job) > memberlist.LabelMaxSize:
		return fmt.Errorf("job id (TORCHFT_JOB_ID) has %d bytes; allowed with gossip: %d", len(c.Job),
			memberlist.LabelMaxSize)
	}
	for _, seed := range c.Seeds {
		host, port, err := net.SplitHostPort(seed)
		if number, bad := strconv.ParseUint(port, 10, 16); err != nil || host == "" || bad != nil ||
			number == 0 {
			return fmt.Errorf("seeds: %q is not allowed; allowed: host:port", seed)
		}
	}
	latest := agree.ID{Name: c.Name, Incarnation: math.MaxInt64}
	longest := agree.Note{
		Address: c.StoreAddress, Asks: true, Wants: math.MaxInt64, Joined: math.MaxInt64,
		Digest: strings.Repeat("f", 16), Formed: true, Left: true,
	}
	if size := len(metadata(latest, longest)); size > memberlist.MetaMaxSize {
		return fmt.Errorf("name=%q is not allowed: with it and the store's address %q the metadata of this "+
			"member have up to %d bytes; allowed: %d",
			c.Name, c.StoreAddress, size, memberlist.MetaMaxSize)
	}
	return nil
}

func (c Config) id() agree.ID { return agree.ID{Name: c.Name, Incarnation: c.Incarnation} }

// nodeMetadata is the metadata of a node.
type nodeMetadata struct {
	agree.ID
	agree.Note
}

func metadata(id agree.ID, note agree.Note) []byte { return encoded(nodeMetadata{id, note}) }

// settings returns the settings of memberlist. A member that stops answering counts as failed after a probe
// and a suspicion: up to 4 seconds in a job of ten members, less if several of them suspect it.
func (c Config) settings() *memberlist.Config {
	conf := memberlist.DefaultLANConfig()
	// a later incarnation is another node: the end of the earlier one may not have been noticed yet
	conf.Name = fmt.Sprintf("%s.%d", c.Name, c.Incarnation)
	conf.Label = c.Job
	conf.ProbeInterval = 500 * time.Millisecond
	conf.ProbeTimeout = 200 * time.Millisecond
	conf.SuspicionMult = 3
	conf.SuspicionMaxTimeoutMult = 3
	// a member on a busy host may take four times as long to notice the end of another one
	conf.AwarenessMaxMultiplier = 4
	conf.GossipInterval = 50 * time.Millisecond // a view takes several of these intervals
	conf.PushPullInterval = 2 * time.Second     // makes up for lost messages
	conf.TCPTimeout = 2 * time.Second           // of one exchange
	// a member that was cut off for less time learns at once that it counts as failed
	conf.GossipToTheDeadTime = 10 * time.Second
	conf.EnableCompression = false // messages are small
	conf.Logger = memberLogger(c.Log)
	return conf
}

// resolve returns the addresses of "host:port".
func resolve(ctx context.Context, address string) ([]string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, ip := range ips {
		found = append(found, net.JoinHostPort(ip.Unmap().String(), port))
	}
	if len(found) == 0 {
		return nil, errors.New("no address")
	}
	return found, nil
}
