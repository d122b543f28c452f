package replica_test

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
	"github.com/torchft/torchft/go/torchftpb"
)

// port is a lighthouse on a real port, with TLS and a token.
type port struct {
	cfg      replica.Config
	security auth.Security
	bind     string
	node     *replica.Node
	server   *rpc.Server
	log      *fttest.Log
}

func newPorts(t *testing.T) (ports []*port) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("127.0.0.1")
	security := auth.Security{TLSCert: cert, TLSKey: key, TLSCA: ca.File, TokenFile: fttest.File(t, "secret")}
	var list []string
	for range 3 {
		lis, err := rpc.TCP.Listen("127.0.0.1:0") // the port stays free until the lighthouse takes it
		require.NoError(t, err)
		list = append(list, "https://"+lis.Addr().String())
		require.NoError(t, lis.Close())
	}
	for _, self := range list {
		log := &fttest.Log{}
		ports = append(ports, &port{
			cfg: replica.Config{Cluster: list, Self: self, Dir: t.TempDir(),
				Logger: slog.New(slog.NewTextHandler(log, nil))},
			security: security, bind: self[len("https://"):], log: log,
		})
	}
	t.Cleanup(func() {
		for _, p := range ports {
			p.stop()
		}
	})
	return ports
}

func (p *port) start(t *testing.T) {
	t.Helper()
	p.cfg.Dialing = rpc.Dialing{Security: p.security}
	var err error
	p.node, err = replica.Open(t.Context(), p.cfg)
	require.NoError(t, err)
	gate, err := rpc.NewGate(p.security, rpc.Limits{}, p.cfg.Logger)
	require.NoError(t, err)
	lis, err := rpc.TCP.Listen(p.bind)
	require.NoError(t, err)
	g := rpc.NewGRPC(gate, p.cfg.Logger)
	replica.Register(g, p.node)
	p.server = rpc.Serve(lis, gate, g, nil, p.cfg.Logger)
}

func (p *port) stop() {
	if p.node != nil {
		p.node.Close()
		p.server.Stop()
		p.node = nil
	}
}

// lead returns when a lighthouse leads. On a busy machine others may follow it.
func lead(t *testing.T, ports []*port) (leader *port, term uint64) {
	t.Helper()
	for began := time.Now(); time.Since(began) < 30*time.Second; time.Sleep(time.Millisecond) {
		for _, p := range ports {
			if p.node == nil {
				continue
			}
			if s := p.node.Status(); s.Leader == s.Self && p.node.Verify(t.Context(), s.Term) == nil {
				return p, s.Term
			}
		}
	}
	for _, p := range ports {
		t.Log(p.log)
	}
	t.Fatal("nobody leads")
	return nil, 0
}

// propose replaces the state of a job by whatever lighthouse leads.
func propose(t *testing.T, ports []*port, state []byte) *port {
	t.Helper()
	for {
		leader, term := lead(t, ports)
		err := leader.node.Propose(term, "job", state)
		if err == nil {
			return leader
		}
		t.Log(err)
	}
}

func TestLighthousesOnRealPortsAndDisks(t *testing.T) {
	ports := newPorts(t)
	for _, p := range ports {
		p.start(t)
	}
	lead(t, ports)
	began := time.Now()
	for i := range 50 {
		propose(t, ports, []byte{byte(i), 1})
	}
	t.Logf("a proposal takes %s", time.Since(began)/50)
	propose(t, ports, make([]byte, 1<<20)) // larger than a frame
	leader := propose(t, ports, []byte("last"))

	began = time.Now()
	leader.server.Stop()
	leader.stop()
	next, _ := lead(t, ports)
	t.Logf("replaced after %s", time.Since(began))
	require.Equal(t, "last", string(next.node.States()["job"]))
	leader.start(t)
	propose(t, ports, []byte("next"))
	for _, p := range ports { // from disk
		p.stop()
	}
	for _, p := range ports {
		p.start(t)
	}
	last, _ := lead(t, ports)
	require.Equal(t, "next", string(last.node.States()["job"]))
	for _, p := range ports {
		require.Zero(t, p.log.Count("level=ERROR"), p.log)
	}
}

func TestStrangersOnTheRealPort(t *testing.T) {
	ports := newPorts(t)
	for _, p := range ports {
		p.start(t)
	}
	leader, _ := lead(t, ports)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for name, c := range map[string]struct {
		token string
		want  codes.Code
	}{"without the token": {"", codes.Unauthenticated},
		"with another token": {"wrong", codes.Unauthenticated}} {
		security := auth.Security{TLSCA: leader.security.TLSCA}
		if c.token != "" {
			security.TokenFile = fttest.File(t, c.token)
		}
		unauthenticated := replica.NewDialer(rpc.Dialing{Security: security})
		_, err := unauthenticated.Identify(ctx, leader.cfg.Self)
		require.Equal(t, c.want, status.Code(err), name)
		require.Equal(t, c.want, status.Code(unauthenticated.Link(ctx, leader.cfg.Self, nil)), name)
		unauthenticated.Close()
		require.ErrorIs(t, unauthenticated.Link(ctx, leader.cfg.Self, nil), net.ErrClosed)
	}
	known := replica.NewDialer(rpc.Dialing{Security: leader.security})
	defer known.Close()
	id, err := known.Identify(ctx, leader.cfg.Self)
	require.NoError(t, err)
	require.Equal(t, leader.node.Identity(), id)
	require.ElementsMatch(t, leader.cfg.Cluster, id.List)
	hello := &torchftpb.Hello{Cluster: id.Cluster, From: "http://x:1#1", To: id.Self + "#" + id.Instance}
	require.NoError(t, known.Link(ctx, leader.cfg.Self, hello))
	lead(t, ports)
}
