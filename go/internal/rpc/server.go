package rpc

import (
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// Server serves gRPC, and HTTP/1.1 on the same port if there is a handler for it.
type Server struct {
	grpc  *grpc.Server
	http  *http.Server // nil without a handler
	split *splitter    // nil without a handler
	tasks sync.WaitGroup
	stop  sync.Once
	// stopping is set before anything is closed. Later errors of the listeners are expected, and not logged.
	stopping atomic.Bool
}

// NewGRPC returns a gRPC server with the limits of this package, whose calls have to pass a gate. Register
// services on it, then call Serve.
func NewGRPC(gate *Gate, log *slog.Logger, options ...grpc.ServerOption) *grpc.Server {
	all := append(serverLimits(), grpc.ForceServerCodecV2(newCodec()),
		grpc.ChainUnaryInterceptor(recoverUnary(log)), grpc.ChainStreamInterceptor(recoverStream(log)),
		gate.option())
	return grpc.NewServer(append(all, options...)...)
}

// Serve serves g, and handler unless it is nil, on lis until Stop, which closes lis.
func Serve(lis net.Listener, gate *Gate, g *grpc.Server, handler http.Handler, log *slog.Logger) *Server {
	s := &Server{grpc: g}
	lis = gate.listen(lis)
	grpcLis := lis
	if handler != nil {
		s.split = newSplitter(lis)
		grpcLis = s.split.grpc
		s.http = &http.Server{
			Handler:           recoverHTTP(log, reading(handler)),
			ConnContext:       withAddress,
			ReadHeaderTimeout: sniffTimeout,
			ReadTimeout:       2 * sniffTimeout,
			WriteTimeout:      time.Minute,
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    maxHeader,
			// Connections that speak neither gRPC nor HTTP end here, and are not logged.
			ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
		}
		Go(&s.tasks, log, "http", func() { _ = s.http.Serve(s.split.http) })
		Go(&s.tasks, log, "accept", func() { s.split.run(&s.tasks, log) })
	}
	Go(&s.tasks, log, "grpc", func() {
		if err := g.Serve(grpcLis); err != nil && !s.stopping.Load() {
			log.Error("torchft: the server stopped listening", "error", err)
		}
	})
	return s
}

// Stop closes the port, waits at most stopGrace for the calls to end, ends those that remain, and returns
// when no goroutine is left. The caller must have answered the pending calls before; their answers are still
// sent.
func (s *Server) Stop() {
	s.stop.Do(func() {
		s.stopping.Store(true)
		cut := time.AfterFunc(stopGrace, s.grpc.Stop)
		defer cut.Stop()
		if s.split != nil {
			s.split.close()
			_ = s.http.Close()
		}
		s.grpc.GracefulStop()
		s.grpc.Stop() // in case GracefulStop came before Serve
		s.tasks.Wait()
	})
}
